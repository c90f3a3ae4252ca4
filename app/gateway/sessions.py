"""Client sessions of the gateway: one per job and process, under a client id that follows from the job.

All processes of a gateway share the client id of a job. So an action that one of them has submitted can be waited for by any other, and
the scheduler takes the client for gone only once none of them lives.

A session has three threads and up to five connections. One that nobody has used for `IDLE_S` is closed, and opened again at its next use.
It is in use while an action of it has no result, its output is read, or a call holds its `Caller`. So what was begun for a caller who is
away goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from tangram.aio import open_session, settled
from tangram.session import CLOSE_WAIT_S, Session
from tangram.settings import Settings

IDLE_S = 600.0
"""Seconds after its last use after which a session is closed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Caller:
    """For whom a call is made: a job, and the session that carries its actions."""

    job: str
    session: Session

    def task_id(self, *key: str) -> str:
        """Return the task id of what is submitted under a key; the same key of the same job gives the same id."""
        return f"{self.session.client_id}-{digest(*key)}"


def client_id_of(job: str) -> str:
    """Return the client id under which gateways act for a job."""
    return f"gw-{digest(job)[:16]}"


def digest(*words: str) -> str:
    """Return 128 bits, as hexadecimal digits, that differ for different words."""
    return hashlib.sha256("".join(f"{len(word)}:{word}" for word in words).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Sessions:
    """The sessions of this process, each opened at its first use."""

    def __init__(self, settings: Settings, idle_s: float = IDLE_S) -> None:
        """Connect as `settings` say; close what was not used for `idle_s` seconds."""
        self._settings, self._idle_s = settings, idle_s
        self._open: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._used_at: dict[str, float] = {}
        self._callers: WeakValueDictionary[str, Caller] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._open)

    async def caller(self, job: str) -> Caller:
        """Return a caller for a job. Raises `StackUnreachable` when the stack does not answer in time."""
        if job not in self._open:
            await asyncio.shield(self._begin(job))
        self._used_at[job] = time.monotonic()
        caller = self._callers.get(job)
        if caller is None:
            caller = self._callers[job] = Caller(job, self._open[job])
        return caller

    async def close_idle(self) -> None:
        """Close sessions that nobody uses, until cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / 4)
            for job, session in tuple(self._open.items()):
                try:
                    await self._close_if_idle(job, session)
                except Exception:  # other sessions are looked at all the same, and this one again where it is still there
                    _log.exception("the session of job %s could not be closed", job)

    async def _close_if_idle(self, job: str, session: Session) -> None:
        now = time.monotonic()
        if job in self._callers or session.in_use:
            self._used_at[job] = now
        elif now >= self._used_at[job] + self._idle_s:
            del self._open[job], self._used_at[job]
            _log.info("the session of job %s was idle for %g s and is closed", job, self._idle_s)
            await asyncio.to_thread(session.stop)

    def _begin(self, job: str) -> asyncio.Task[Session]:
        """Return the one attempt to connect for a job, which all its callers wait for."""
        if job not in self._opening:
            self._opening[job] = asyncio.create_task(self._connect(job))
        return self._opening[job]

    async def _connect(self, job: str) -> Session:
        try:
            session = self._open[job] = await open_session(job, self._settings, client_id=client_id_of(job))
            self._used_at[job] = time.monotonic()
            return session
        finally:
            del self._opening[job]

    async def close(self) -> None:
        """Close the environments that go with this process, waiting a bounded time for that, and all connections."""
        closing: list[Future[Any]] = []
        for job, session in self._open.items():
            try:
                closing += session.begin_closing()
            except Exception:  # the sessions of other jobs are closed all the same
                _log.exception("environments of job %s could not be closed", job)
        await settled(closing, CLOSE_WAIT_S)
        for job, session in self._open.items():
            try:
                await asyncio.to_thread(session.stop)
            except Exception:
                _log.exception("the session of job %s could not be closed", job)
        self._open.clear()
