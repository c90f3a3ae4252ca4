"""Making sure, before a process settles down to wait for messages, that there is somebody to wait for, and what it needs is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis, RedisError

from tangram.connection import show
from tangram.errors import StackUnreachable, TangramError

log = logging.getLogger(__name__)

_NO_EVICTION = "noeviction"


def require_broker(app: Celery, timeout_s: float) -> None:
    """Connect to the broker once. Raises `StackUnreachable` when it does not answer within about `timeout_s`."""
    connection = app.connection_for_write()
    errors = (*connection.connection_errors, *connection.channel_errors, OperationalError, OSError)
    try:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=timeout_s)
        connection.default_channel  # noqa: B018 - on Redis only a channel talks to the server
    except errors as error:
        raise StackUnreachable(f"the broker at {connection.as_uri()} cannot be reached: {error}") from None
    finally:
        connection.release()


def require_store(store: Redis, url: str) -> None:
    """Ask the result store for an answer. Raises `StackUnreachable` when there is none. Warns of a store that may evict keys."""
    try:
        store.ping()
    except (RedisError, OSError) as error:
        raise StackUnreachable(f"the result store at {show(url)} cannot be reached: {error}") from None
    with suppress(RedisError):  # not every user may ask
        policy = store.info("memory").get("maxmemory_policy", _NO_EVICTION)
        if policy != _NO_EVICTION:
            log.warning("Redis at %s has maxmemory-policy %s: it may drop claims and results, set %s", show(url), policy, _NO_EVICTION)


@contextmanager
def needed_for_metrics() -> Iterator[None]:
    """Import what metrics need. Raises `TangramError` where the extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise TangramError(f"TANGRAM_METRICS_PORT needs {error.name}: pip install 'arl-tangram-server[metrics]'") from error
