"""The scheduler as a process: core, broker, journal and lock put together; `tangram scheduler`.

One scheduler of each shard is active. It holds a lease in SQL, whose epoch is the fencing token in every grant; further ones stand
by and take over when it is gone. One that does not reach the broker gives the lease up, and takes it again only once it does.
While a scheduler lives, none leads that counts other shards: all that count the same hold a second lease together.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from celery import Celery
from sqlalchemy import Engine

from app.broker.transport import KombuTransport
from app.celery import make_app
from app.event_log import EventLogFile, open_to_add
from app.journal.database import DatabaseError, open_latest
from app.journal.figures import observations
from app.journal.leader import SCHEDULER_LEASE, SHARDS_LEASE, Lease, holder_name
from app.journal.retention import Pruning, Retention
from app.journal.writing import LeaseLost, SqlJournal
from app.preconditions import needed_for_metrics, require_broker, require_store
from app.services_file import ServicesFile, load_services_file
from scheduler.learning.durations import Observation
from scheduler.live.descriptions import service_spec
from scheduler.live.entries import Journal
from scheduler.live.event_log import Setup
from scheduler.live.service import Service
from scheduler.model import Limits
from scheduler.model.copied import filled
from tangram import clock
from tangram.connection import find_addresses, open_store
from tangram.errors import StackUnreachable
from tangram.settings import Settings
from tangram.shards import FIRST
from tangram.tracing import tracer_of
from tangram.wire import of_shard

if TYPE_CHECKING:
    from app.metrics.scheduler import SchedulerMetrics

log = logging.getLogger(__name__)

QUOTA_LEAD_S = 0.15
"""How much ahead of its time a request to an outside API is granted: what commit, broker and worker take on a busy machine. Workers wait
for no longer than `workers.api.requests.LONGEST_LEAD_S`."""

AWAY = 2.0
"""Lasting times of the lease for which the broker may be away before the active scheduler gives the lease up. Each change costs the
messages that were not sent yet: nodes are asked for them."""

_LOOKS = 5
"""How often a standby looks at the lease, and the active one prolongs it, while it lasts."""


def run(settings: Settings, stop: threading.Event) -> None:
    """Schedule until `stop` is set.

    Raises `StackUnreachable` when the broker cannot be reached at the start, or no database is named; `DatabaseError` when the database
    cannot be used; `ConfigError` when the services file is wrong; `UnknownPolicy` when there is no such policy, or it has no such part to
    go without; `OSError` when there can be no event log.
    """
    if settings.event_log is not None:  # schedulers of one host may have the same settings but for their shard
        own = settings.event_log.with_name(of_shard(settings.event_log.name, settings.shard))
        settings = settings.model_copy(update={"event_log": own})
    if settings.database_url is None:
        raise StackUnreachable("TANGRAM_DATABASE_URL is not set: the scheduler keeps its journal there")
    # What is wrong with the settings is said before there is a lease that others wait for.
    setup_of(settings).core()
    if settings.event_log is not None:
        open_to_add(settings.event_log).close()
    engine = open_latest(settings.database_url, connect_timeout_s=settings.connect_timeout_s)
    addresses = find_addresses(settings)
    require_broker(make_app(settings), settings.connect_timeout_s)
    require_store(open_store(addresses.result_url, settings.connect_timeout_s), addresses.result_url)
    metrics = _metrics(settings)
    tracer_of(settings, "tangram-scheduler")  # what is missing is said now
    lease = Lease(engine, of_shard(SCHEDULER_LEASE, settings.shard), holder_name(), settings.takeover_s, patient=True)

    def connect(epoch: int) -> KombuTransport:
        return transport_of(settings, _app_of(settings), epoch)

    def reach() -> None:
        require_broker(_app_of(settings), settings.connect_timeout_s)

    Scheduler(settings, engine, lease, connect, reach, partial(_watched, settings, metrics), metrics).run(stop)


class Scheduler:
    """One scheduler: it stands by until it holds the lease, then leads until another one does.

    `connect` opens the broker for an epoch, and `reach` raises `StackUnreachable` where it cannot be reached. `watch` returns the journal
    that an epoch writes to, around the one in SQL.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        lease: Lease,
        connect: Callable[[int], KombuTransport],
        reach: Callable[[], None],
        watch: Callable[[Journal, int], Journal],
        metrics: SchedulerMetrics | None = None,
    ) -> None:
        self._settings, self._engine, self._lease = settings, engine, lease
        self._count = Lease(engine, SHARDS_LEASE, str(settings.shards), settings.takeover_s, patient=True)
        self._connect, self._reach, self._watch, self._metrics = connect, reach, watch, metrics

    def run(self, stop: threading.Event) -> None:
        """Schedule until `stop` is set. Raises what `run` of this module raises once it leads."""
        could = True
        while not stop.is_set():
            try:
                if not could:
                    self._reach()
                epoch = self._acquire()
                could = True
                if epoch is not None:
                    log.warning("this scheduler leads, epoch %d", epoch)
                    self._lead(epoch, stop)
                    continue
            except StackUnreachable as error:
                # The broker was there when this process began. Until it is there again, others that reach it may lead. While schedulers of
                # another number of shards live, they lead.
                if could:
                    log.warning("cannot lead: %s", error)
                could = False
            stop.wait(self._lease.ttl_s / _LOOKS)

    def _acquire(self) -> int | None:
        """Try to lead; a database that is away for a while is waited for like a lease that another one holds.

        Raises `StackUnreachable` while schedulers live that count other shards.
        """
        try:
            if self._count.acquire(clock.time()) is not None:
                return self._lease.acquire(clock.time())
        except DatabaseError as error:
            log.warning("the lease cannot be looked at: %s", error)
            return None
        here, there = self._count.holder, self._count.last_seen_holder
        raise StackUnreachable(f"TANGRAM_SHARDS is {here} here, and {there} for the schedulers that run")

    def _lead(self, epoch: int, stop: threading.Event) -> None:
        settings, renewal = self._settings, _Renewal(self._lease, self._count)
        transport = event_log = None
        try:
            setup = setup_of(settings, observations(self._engine, settings.history, between=renewal.still_leading))
            if settings.event_log is not None:
                event_log = EventLogFile(settings.event_log, epoch, setup)
            renewal.still_leading()
            transport = self._connect(epoch)
            renewal.still_leading()
            with SqlJournal(self._engine, lease=self._lease, shard=settings.shard) as journal:
                service = Service(
                    setup.core(),
                    transport,
                    self._watch(journal, epoch),
                    epoch=epoch,
                    clock=clock.time,
                    still_leading=renewal.still_leading,
                    orphan_s=settings.orphan_s,
                    event_log=event_log,
                    observer=self._metrics,
                    shard=settings.shard,
                    shards=settings.shards,
                )
                unfinished = service.recover()
                if unfinished:
                    log.warning("going on with %d unfinished actions", unfinished)
                with _pruning(settings, self._engine, self._lease):
                    while not stop.is_set():
                        if not service.step():
                            log.warning("another scheduler leads; standing by")
                            return
                        if transport.away_s > AWAY * self._lease.ttl_s:
                            service.finish()
                            raise StackUnreachable(f"the broker has been away for {transport.away_s:.0f} s")
                    service.finish()
        except LeaseLost:
            log.warning("another scheduler leads; standing by")
        finally:
            if self._metrics is not None:
                self._metrics.stand_by()
            if transport is not None:
                transport.close()
            if event_log is not None:
                event_log.close()
            with suppress(DatabaseError):  # a database that is gone has said so already, and the lease runs out by itself
                self._lease.release()


def _metrics(settings: Settings) -> SchedulerMetrics | None:
    """Begin to serve metrics, where there is a port for them; else their library is not even imported."""
    if settings.metrics_port is None:
        return None
    with needed_for_metrics():
        from app.metrics.scheduler import start
    return start(settings)


def _watched(settings: Settings, metrics: SchedulerMetrics | None, journal: Journal, epoch: int) -> Journal:
    """Return the journal that metrics and spans see, where they are on."""
    tracer = tracer_of(settings, "tangram-scheduler")
    if tracer is not None:
        from app.spans import TracedJournal

        journal = TracedJournal(journal, tracer)
    return journal if metrics is None else metrics.lead(journal, epoch)


def _pruning(settings: Settings, engine: Engine, lease: Lease) -> AbstractContextManager[object]:
    """Return the context in which what is too old leaves the journal, of whatever shard it is."""
    if settings.keep_days == "forever" or settings.shard != FIRST:
        return nullcontext()
    succeeded = settings.keep_days if settings.keep_succeeded_days == "forever" else settings.keep_succeeded_days
    retention = Retention(
        engine,
        keep_days=settings.keep_days,
        keep_succeeded_days=min(settings.keep_days, succeeded),
        most_mb=settings.journal_mb,
        history=settings.history,
        lease=lease,
    )
    return Pruning(retention)


def transport_of(settings: Settings, app: Celery, epoch: int) -> KombuTransport:
    """Return the broker as the scheduler of an epoch, and of its shard, uses it. Raises `StackUnreachable`."""
    same = {"shard": settings.shard, "shards": settings.shards}
    return KombuTransport(app, connect_timeout_s=settings.connect_timeout_s, epoch=epoch, **same)


def _app_of(settings: Settings) -> Celery:
    """Return an application that fails fast: this process has other things to do than to wait for one result to be stored."""
    app = make_app(settings)
    app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}
    return app


def setup_of(settings: Settings, history: Sequence[Observation] = ()) -> Setup:
    """Return what the core is to be made of."""
    declared = ServicesFile.model_construct(services={}, quotas={})
    if settings.services_file is not None and settings.shard == FIRST:
        declared = load_services_file(settings.services_file)
    shards = settings.shards
    starts = {"starting_limit": max(1, settings.starting_limit // shards), "starts_per_s": settings.starts_per_s / shards}
    limits = filled(Limits, settings, weights=settings.shares, window_s=settings.order_window_s, **starts)
    return Setup(
        policy=settings.policy,
        depth=settings.depth,
        without=settings.without,
        limits=limits,
        services=tuple(service_spec(name, service.model_dump()) for name, service in declared.services.items()),
        quotas=declared.quota_specs(QUOTA_LEAD_S),
        history=tuple(history),
    )


class _Renewal:
    """Renews the lease, and that of the number of shards, often enough and no oftener."""

    def __init__(self, lease: Lease, count: Lease) -> None:
        self._lease, self._count = lease, count
        self._next = 0.0

    def still_leading(self) -> bool:
        if clock.monotonic() < self._next:
            return self._lease.epoch is not None
        now, self._next = clock.time(), clock.monotonic() + self._lease.ttl_s / _LOOKS
        try:
            if self._count.acquire(now) is not None:
                return self._lease.renew(now)
            self._lease.release()  # so that nothing more is written, whoever asked
            return False
        except DatabaseError as error:
            # The lease runs out by itself; until then nobody else leads, and every write checks it.
            log.warning("the lease cannot be renewed yet: %s", error)
            return True
