"""One look at the deployment at a time, shared by all viewers.

However many pages are open, the journal is asked once per interval. A look that takes long makes the interval longer, up to `MOST_PAUSE_S`,
so that looking costs about a tenth of the time. A look that failed has mostly waited for a timeout: the next one follows an interval after
it. While nobody watches, nothing is read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from redis import Redis, RedisError
from sqlalchemy import Connection, Engine

from app.journal.database import DatabaseError, snapshot
from app.journal.lanes import Lanes
from app.journal.overview import Document, overview, read_present
from app.journal.recent import Recent
from app.scheduler_document import problem_of, read_shown, silences_of
from app.web.attention import Attention, Notice, notices

INTERVAL_S: Final = 1.0
LOOKING_FRACTION: Final = 0.1
"""Fraction of the time that looking may take, as long as the pause after a look stays below `MOST_PAUSE_S`."""

MOST_PAUSE_S: Final = 5.0
"""Longest pause after a look."""

SEARCHES: Final = 2
"""Lists that are read at a time; a further one waits."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look has seen. `problem` says in one line what is wrong with the journal or the result store.

    `notices` need attention, and those that are `resolved` did so lately.
    """

    version: int
    at: float
    scheduler: Mapping[str, Any] | None
    overview: Document | None
    problem: str = ""
    notices: Sequence[Notice] = ()
    resolved: Sequence[Notice] = ()


class Looks:
    """The looks at a deployment, each taken when somebody asks."""

    def __init__(self, engine: Engine, store: Redis, shards: int = 1) -> None:
        self._engine = engine
        self._shards = shards
        self._store = store
        self._one_look = asyncio.Lock()
        self._reading = threading.Lock()
        # Whatever pages ask, a thread is free for the look, and others for what one thing is asked about.
        self._looking = ThreadPoolExecutor(1, "tangram-look")
        self._searching = ThreadPoolExecutor(SEARCHES, "tangram-search")
        self._look: Look | None = None
        self._next_at = 0.0
        self._attention = Attention()
        self.recent = Recent()
        self.lanes = Lanes(time.time())

    async def now(self) -> Look:
        """Return the latest look, at most about two intervals old."""
        look = self._look
        if look is not None and time.monotonic() < self._next_at + INTERVAL_S:
            return look
        return await self.after(0)

    async def after(self, version: int) -> Look:
        """Return a look that is later than `version`, as soon as the interval allows one."""
        async with self._one_look:
            look = self._look
            if look is not None and look.version > version and time.monotonic() < self._next_at + INTERVAL_S:
                return look
            await asyncio.sleep(max(0.0, self._next_at - time.monotonic()))
            return await asyncio.get_running_loop().run_in_executor(self._looking, self._take)

    async def ask(self, question: Callable[[Connection], T]) -> T:
        """Return what a question about one thing finds in the journal. Raises `DatabaseError`."""
        return await asyncio.to_thread(self._answer, question)

    async def search(self, question: Callable[[Connection], T]) -> T:
        """Return what a question finds that may read much of the journal. Raises `DatabaseError`."""
        return await asyncio.get_running_loop().run_in_executor(self._searching, self._answer, question)

    def close(self) -> None:
        """Take no more questions."""
        for pool in (self._looking, self._searching):
            pool.shutdown(wait=False, cancel_futures=True)

    def timeline(self, since: int) -> dict[str, Any]:
        """Return what changed on the timeline after a version of it. Blocks while a look is taken."""
        with self._reading:
            return self.lanes.since(since)

    def _answer(self, question: Callable[[Connection], T]) -> T:
        with snapshot(self._engine) as connection:
            return question(connection)

    def _take(self) -> Look:
        # A viewer that leaves while its look is taken gives up its turn, not the thread.
        with self._reading:
            began, now = time.monotonic(), time.time()
            version = self._look.version + 1 if self._look is not None else 1
            problem, scheduler, document, found = "", None, None, list[Notice]()
            try:
                scheduler, problem = read_shown(self._store, self._shards), problem_of(self._store)
            except (RedisError, OSError) as error:
                problem = f"the result store cannot be read: {error}"
            try:
                with snapshot(self._engine) as connection:
                    present = read_present(connection, now)
                    self.recent.read(connection, now)
                    self.lanes.read(connection, present)
                document = overview(present, self.recent, scheduler, {} if problem else silences_of(self._store, present))
                found = notices(document, problem)
                if not problem:  # with a problem, notices are missing that are not resolved
                    found = self._attention.see(found, now, has_scheduler=scheduler is not None)
            except DatabaseError as error:
                problem = f"the journal cannot be read: {error}"
            ended = time.monotonic()
            pause_s = min(MOST_PAUSE_S, (ended - began) * (1 / LOOKING_FRACTION - 1))
            self._next_at = ended + INTERVAL_S if problem else max(began + INTERVAL_S, ended + pause_s)
            self._look = Look(
                version=version,
                at=now,
                scheduler=scheduler,
                overview=document,
                problem=problem,
                notices=found,
                resolved=self._attention.resolved,
            )
            return self._look
