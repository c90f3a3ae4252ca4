"""Client sessions of the gateway: one per job and process, under a client id that follows from the job.

All processes of a gateway share the client id of a job. So an action that one of them has submitted can be waited for by any other, and
the scheduler takes the client for gone only once none of them lives.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from tangram.aio import open_session, settled
from tangram.session import CLOSE_WAIT_S, Session
from tangram.settings import Settings


@dataclass(frozen=True, slots=True)
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

    def __init__(self, settings: Settings) -> None:
        """Connect as `settings` say."""
        self._settings = settings
        self._open: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}

    async def caller(self, job: str) -> Caller:
        """Return a caller for a job. Raises `StackUnreachable` when the stack does not answer in time."""
        session = self._open.get(job)
        return Caller(job, session if session is not None else await asyncio.shield(self._begin(job)))

    def _begin(self, job: str) -> asyncio.Task[Session]:
        """Return the one attempt to connect for a job, which all its callers wait for."""
        if job not in self._opening:
            self._opening[job] = asyncio.create_task(self._connect(job))
        return self._opening[job]

    async def _connect(self, job: str) -> Session:
        try:
            self._open[job] = await open_session(job, self._settings, client_id=client_id_of(job))
            return self._open[job]
        finally:
            del self._opening[job]

    async def close(self) -> None:
        """Close the environments that go with this process, waiting a bounded time for that, and all connections."""
        closing = [future for session in self._open.values() for future in session.begin_closing()]
        await settled(closing, CLOSE_WAIT_S)
        for session in self._open.values():
            await asyncio.to_thread(session.stop)
        self._open.clear()
