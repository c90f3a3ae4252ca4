"""The Celery application, `celery -A app …`: JSON only, every action through the scheduler.

Workers of the system and Celery's own tools (`inspect`, Flower) use this object. What is particular:

* `task_routes` is the custom routing layer (`app/routing.py`): actions go to the scheduler, not to a worker.
* Nothing is prefetched away from the scheduler, since a worker is only handed what can start; hence no limit.
* A worker acknowledges no message (`workers/consumer.py`): the scheduler finds what was lost, and claims keep actions from running twice.
* An error reply of the broker is an outage like any other: it ends no worker.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from app.routing import install_routing
from tangram.connection import broker_tls, find_addresses, transport_options
from tangram.errors import StackUnreachable
from tangram.settings import Settings
from tangram.wire import RESULT_TTL_S


def make_app(settings: Settings | None = None) -> Celery:
    """Build the application for the addresses of `settings`.

    Where no stack is known yet the application is still made, so that `celery -A app --help` works; it then says
    that it cannot connect once it has to. Raises `StackUnreachable` for an address that is wrong.
    """
    settings = settings or Settings()
    try:
        addresses = find_addresses(settings)
        broker_url, result_url = addresses.broker_url, addresses.result_url
    except StackUnreachable:
        if settings.broker_url or settings.result_url:
            raise
        broker_url = result_url = f"redis+socket://{settings.state_dir}/redis.sock?virtual_host=0"
    broker_url, tls = broker_tls(broker_url)
    celery = Celery("tangram", broker=broker_url, backend=result_url)
    celery.conf.update(configuration(settings))
    celery.loader.override_backends = dict.fromkeys(("redis", "rediss"), "app.broker.results:RedisResults")
    celery.conf.broker_transport_options = transport_options(broker_url, settings.connect_timeout_s)
    celery.conf.broker_use_ssl = tls
    install_routing(celery, settings.shards)
    return celery


def configuration(settings: Settings) -> dict[str, Any]:
    """Return the Celery settings that do not depend on addresses."""
    return {
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "result_accept_content": ["json"],
        "result_expires": RESULT_TTL_S,
        "result_backend_thread_safe": True,
        "task_acks_late": False,
        "task_track_started": False,
        "worker_prefetch_multiplier": 0,
        "worker_hijack_root_logger": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "broker_connection_retry_on_startup": True,
        "broker_channel_error_retry": True,
        "broker_connection_timeout": settings.connect_timeout_s,
        "redis_socket_timeout": settings.connect_timeout_s,
        "redis_socket_connect_timeout": settings.connect_timeout_s,
        "timezone": "UTC",
    }


app = make_app()
