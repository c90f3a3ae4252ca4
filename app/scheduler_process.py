"""The scheduler as a process: core, broker, journal and lock put together; `tangram scheduler`.

One scheduler is active. It holds a lease in SQL, whose epoch is the fencing token in every grant; further ones stand
by and take over when it is gone.
"""

from __future__ import annotations

import logging
import threading
import time

from sqlalchemy import Engine

from app.celery import make_app
from app.database import open_engine, require_latest
from app.journal import LeaseLost, SqlJournal
from app.leader import Lease, holder_name
from app.services_file import ServicesFile, load_services_file
from app.transport import KombuTransport
from scheduler.core import Core
from scheduler.model import Limits, QuotaSpec, ServiceSpec
from scheduler.policies import make_policy
from scheduler.service import Service
from tangram.errors import StackUnreachable
from tangram.settings import Settings

log = logging.getLogger(__name__)

LEASE_TTL_S = 10.0
_STANDBY_LOOK_S = 1.0


def run(settings: Settings, stop: threading.Event) -> None:
    """Schedule until `stop` is set.

    Raises
    ------
    StackUnreachable
        When the broker cannot be reached, or no database is named.
    DatabaseError
        When the database cannot be used.
    ConfigError
        When the services file is wrong.

    """
    if settings.database_url is None:
        raise StackUnreachable("TANGRAM_DATABASE_URL is not set: the scheduler keeps its journal there")
    engine = open_engine(settings.database_url, connect_timeout_s=settings.connect_timeout_s)
    require_latest(engine)
    lease = Lease(engine, "scheduler", holder_name(), LEASE_TTL_S)
    while not stop.is_set():
        epoch = lease.acquire(time.time())
        if epoch is None:
            stop.wait(_STANDBY_LOOK_S)
            continue
        log.warning("this scheduler leads, epoch %d", epoch)
        _lead(settings, engine, lease, epoch, stop)


def _lead(settings: Settings, engine: Engine, lease: Lease, epoch: int, stop: threading.Event) -> None:
    core = make_core(settings)
    transport = KombuTransport(make_app(settings), connect_timeout_s=settings.connect_timeout_s)
    renewal = _Renewal(lease)
    try:
        with SqlJournal(engine, lease=lease) as journal:
            service = Service(core, transport, journal, epoch=epoch, still_leading=renewal.still_leading)
            unfinished = service.recover()
            if unfinished:
                log.warning("going on with %d unfinished actions", unfinished)
            while not stop.is_set():
                if not service.step():
                    log.warning("another scheduler leads; standing by")
                    return
    except LeaseLost:
        log.warning("another scheduler leads; standing by")
    finally:
        transport.close()
        if stop.is_set():
            lease.release()


def make_core(settings: Settings) -> Core:
    """Build the core that the settings describe."""
    declared = ServicesFile.model_construct(services={}, quotas={})
    if settings.services_file is not None:
        declared = load_services_file(settings.services_file)
    limits = Limits(
        queue_limit=settings.queue_limit,
        lease_s=settings.lease_s,
        beat_s=settings.beat_s,
        starting_limit=settings.starting_limit,
        starts_per_s=settings.starts_per_s,
    )
    services = tuple(
        ServiceSpec(
            name=name,
            cells=tuple(service.cells),
            memory_mb=int(service.memory_mb),
            restore_s=service.restore_s,
            max_concurrency=service.max_concurrency,
            instances_per_node=1,
            sizes=tuple(service.cells),
        )
        for name, service in declared.services.items()
    )
    quotas = tuple(
        QuotaSpec(name=name, rate_per_s=quota.rate_per_s, concurrency=quota.concurrency, burst=quota.burst)
        for name, quota in declared.quotas.items()
    )
    return Core(make_policy(settings.policy, depth=settings.depth), limits=limits, services=services, quotas=quotas)


class _Renewal:
    """Renews the lease often enough and no oftener."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._next = 0.0

    def still_leading(self) -> bool:
        now = time.time()
        if now < self._next:
            return True
        self._next = now + LEASE_TTL_S / 4
        return self._lease.renew(now)
