"""Broker, result store and journal as the processes of a world meet them. Each call takes time, and may fail in the ways of a network.

A call gives way before it is carried out, and again before its answer is back. So a process can be killed, frozen or cut off
between any two statements of its own that others can see.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

from redis import ConnectionError as RedisConnectionError
from redis import OutOfMemoryError, ReadOnlyError, ResponseError
from redis import TimeoutError as RedisTimeoutError
from sqlalchemy import Engine, create_engine
from sqlalchemy.event import listen
from sqlalchemy.pool import StaticPool

from app.broker.memory_store import MemoryBroker
from app.journal.database import DatabaseError, open_engine, sqlite_url
from app.journal.leader import Lease
from app.journal.migrating import upgrade
from app.journal.writing import JournalError
from scheduler.live.entries import ActionGranted, Entry, Journal, NodeChanged, Unfinished
from tangram.wire import CONTROL_QUEUE, INGRESS_QUEUE
from tests.virtual.api import Api
from tests.virtual.clock import Process, World

SLOW_S = 0.004
"""The most that one way of a call takes, usually."""

GIVEN_UP_S = 5.0
"""How long a process waits for an answer of a host that says nothing."""


class Refused(RedisConnectionError, ConnectionError):
    """Raised where a network refuses."""


class Unanswered(RedisTimeoutError, ConnectionError):
    """Raised where a network is silent for too long."""


ERROR_REPLIES: tuple[tuple[type[ResponseError], frozenset[str]], ...] = (
    (OutOfMemoryError, frozenset({"put", "set", "take"})),
    (ReadOnlyError, frozenset({"put", "pop", "set", "delete", "expire", "take", "acknowledge", "publish"})),
)
"""Errors that a Redis answers with, and which operations it refuses: one without memory, and one that only reads, as with a full disk."""


class Network:
    """What is between processes, broker and journal. Faults are its attributes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker_away = False
        self.answers_errors: int | None = None
        """Which of `ERROR_REPLIES` the broker gives."""
        self.journal_away = False
        self.slow_s = SLOW_S
        self.cut: dict[str, str] = {}
        """Processes that do not reach the broker, and how: `refused` or `silent`."""
        self.loses_answers = 0.0
        """With which probability the answer of a call that was carried out does not come back."""
        self.kill_at: dict[str, int] = {}
        """Processes that die at their so many next calls."""
        self.freeze_before_sending: dict[str, float] = {}
        """Processes that freeze as soon as the journal has the next grant that they write, and for how long."""
        self.written = 0
        """How often something was written into the journal."""
        self.granted: list[tuple[float, str]] = []
        """When grants were written, and of which actions."""
        self.broker = FaultyBroker(self)
        self.api = Api(world)

    def called(self, operation: str, name: str) -> None:
        """Carry a call of the broker to it, or its answer back."""
        process = self._reached()
        if process is None:
            return
        how = self.cut.get(process.name)
        if how == "silent":
            self.world.sleep(GIVEN_UP_S)
            raise Unanswered("no answer in time")
        if how is not None or self.broker_away:
            raise Refused("connection refused")
        if self.answers_errors is not None and operation in ERROR_REPLIES[self.answers_errors][1]:
            raise ERROR_REPLIES[self.answers_errors][0]("this command is not allowed")
        if operation.endswith("done") and self.world.random.random() < self.loses_answers:
            raise Refused("connection reset: the answer is lost")

    def asked(self, operation: str) -> None:
        """Carry a call of the journal to it, or its answer back."""
        if self._reached() is not None and self.journal_away:
            raise JournalError("the database is away")

    def wrote(self, entries: Sequence[Entry]) -> None:
        """Note that the journal has something new."""
        self.written += 1
        self.granted += [(self.world.now, one.id) for one in entries if isinstance(one, ActionGranted)]
        self.api.lost_at |= {one.name: self.world.now for one in entries if isinstance(one, NodeChanged) and one.state == "lost"}
        process = self.world.process()
        if process is not None and process.name in self.freeze_before_sending and any(isinstance(one, ActionGranted) for one in entries):
            process.freeze()
            self.world.later(self.freeze_before_sending.pop(process.name), process.thaw)

    def _reached(self) -> Process | None:
        process = self.world.process()
        if process is None:
            return None
        left = self.kill_at.get(process.name)
        if left is not None:
            self.kill_at[process.name] = left - 1
            if left <= 1:
                del self.kill_at[process.name]
                process.kill()
        thread = self.world.thread_here()
        assert thread is not None
        thread.block(self.world.random.random() ** 4 * self.slow_s)
        return process


class FaultyBroker(MemoryBroker):
    """A broker whose messages may come twice, come late or be lost: those between scheduler and nodes, and submissions of trainers.

    Trainers do not repeat a control request that the broker has, so only a broker that comes back empty loses these.
    """

    def __init__(self, network: Network) -> None:
        super().__init__(network.called)
        self._world = network.world
        self.loses_submissions = False
        self.faults: dict[str, float] = {}
        """With which probability each happens to a message: `lost`, `doubled`, `late`."""

    def put(self, queue: str, message: bytes, *, first: bool = False) -> None:
        is_submission = queue.startswith(INGRESS_QUEUE)  # to whatever shard
        if self.loses_submissions and is_submission:
            return
        chance = self._world.random.random()
        for fault, probability in self.faults.items():
            if 0 <= chance < probability and not first and not (fault == "lost" and (is_submission or queue.startswith(CONTROL_QUEUE))):
                if fault == "doubled":
                    super().put(queue, message)
                if fault in ("doubled", "late"):
                    self._world.later(self._world.random.uniform(0.0, 3.0), partial(super().put, queue, message))
                return
            chance -= probability
        super().put(queue, message, first=first)


class VirtualJournal:
    """A journal at the other end of a network."""

    def __init__(self, journal: Journal, network: Network) -> None:
        self._journal, self._network = journal, network

    def write(self, entries: Sequence[Entry]) -> None:
        if entries:
            self._network.asked("write")
        self._journal.write(entries)
        if entries:
            self._network.wrote(entries)
            self._network.asked("write done")

    def unfinished(self) -> Unfinished:
        self._network.asked("read")
        return self._journal.unfinished()

    def has_ended(self, action_id: str) -> bool:
        self._network.asked("read")
        return self._journal.has_ended(action_id)


class VirtualLease(Lease):
    """A lease at the other end of a network."""

    network: Network

    def acquire(self, now: float) -> int | None:
        self._ask("acquire")
        return super().acquire(now)

    def renew(self, now: float) -> bool:
        self._ask("renew")
        return super().renew(now)

    def release(self) -> None:
        self._ask("release")
        super().release()

    def _ask(self, operation: str) -> None:
        try:
            self.network.asked(operation)
        except JournalError as error:
            raise DatabaseError(str(error)) from error


@cache
def _template() -> sqlite3.Connection:
    """Return a database with the latest tables, made once."""
    with TemporaryDirectory(prefix="tangram-virtual-") as folder:
        path = Path(folder) / "template.sqlite"
        upgrade(sqlite_url(path))
        engine = open_engine(sqlite_url(path))
        template = sqlite3.connect(":memory:", check_same_thread=False)
        with engine.connect() as connection:
            connection.connection.driver_connection.backup(template)  # type: ignore[union-attr]
        engine.dispose()
    return template


@cache
def _journal() -> tuple[sqlite3.Connection, Engine]:
    """Return the database of all worlds of this process, and its engine, which keeps what SQLAlchemy has compiled."""
    database = sqlite3.connect(":memory:", check_same_thread=False)
    database.isolation_level = None
    engine = create_engine("sqlite://", creator=lambda: database, poolclass=StaticPool)
    listen(engine, "begin", lambda _: database.execute("BEGIN IMMEDIATE"))
    return database, engine


def open_journal() -> tuple[sqlite3.Connection, Engine]:
    """Return the database and the engine of an empty journal in memory, which takes the place of the one before."""
    database, engine = _journal()
    database.rollback()
    _template().backup(database)
    return database, engine
