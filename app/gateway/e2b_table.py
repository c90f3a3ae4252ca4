"""The processes of a sandbox as all copies of the gateway know them: numbers for commands that run, and where each runs.

Every command has a shell session to itself: the first one that is free. So commands that follow one another share a session. Commands that
run at the same time have one each.

| key | holds |
|---|---|
| `tangram-gw-e2b-<sandbox>` | hash, kept as long as the record of the sandbox |
| … `last` | the last number that was given to a process |
| … `session:<n>` | the number of the process that has session n |
| … `process:<number>` | its session, a space, and the process as JSON |
| … `closed:<number>` | there once its input was closed |
| `tangram-gw-e2b-killed-<sandbox>-<word>` | there for an hour where somebody has killed the process of that word |
| `tangram-gw-e2b-ended-<sandbox>-<number>` | a process that has ended, as JSON, for `ENDED_S` |
| `tangram-gw-e2b-ended-<sandbox>-tag-<tag>` | the same, for the last one that had a tag |

Each process has a random word, too, which its action's key contains. So numbers that begin again, as those of a lost hash do, lead to no
result of an earlier process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import cast

from pydantic import BaseModel
from redis import RedisError
from redis.asyncio import Redis

from app.gateway.records import KEPT_S, PROCESSES_PREFIX, SHELLS_PREFIX, Record, record_key
from tangram.wire import RESULT_TTL_S

_ADD = """
redis.call('HSETNX', KEYS[1], 'last', ARGV[2])
local number = redis.call('HINCRBY', KEYS[1], 'last', 1)
local session = 0
while redis.call('HSETNX', KEYS[1], 'session:' .. session, number) == 0 do session = session + 1 end
if ARGV[3] then redis.call('HSET', KEYS[1], 'process:' .. number, session .. ' ' .. ARGV[3]) end
redis.call('EXPIRE', KEYS[1], math.max(redis.call('TTL', KEYS[2]), tonumber(ARGV[1])))
"""
"""KEYS: the hash, the record.

ARGV: the seconds to keep the hash at least; what numbers are above; the process, absent for one that is not to be listed.
"""

_HOLD = f"{_ADD} return {{number, session}}"

_BEGIN = f"""
local raw = redis.call('GET', KEYS[2])
if not raw then return {{0, 0}} end
for i = 2, 3 do if redis.call('TTL', KEYS[i]) < tonumber(ARGV[1]) then redis.call('EXPIRE', KEYS[i], ARGV[1]) end end
local record = cjson.decode(raw)
if record.state ~= 'open' or record.access_token ~= ARGV[4] then return {{0, 0, raw}} end
{_ADD} return {{number, session, raw}}"""
"""Reads the record, too, and adds nothing unless the sandbox is open and has the token `ARGV[4]`.

KEYS: the hash, the record, what else goes with it.
"""

PIDS = 1 << 22
"""The most that the kernel numbers processes. Numbers here are above it, so that none is that of another process inside the sandbox."""

_REMOVE = """
if redis.call('HDEL', KEYS[1], 'process:' .. ARGV[1]) == 1 then
  for i = 2, #KEYS do redis.call('SET', KEYS[i], ARGV[3], 'EX', ARGV[4]) end
end
redis.call('HDEL', KEYS[1], 'closed:' .. ARGV[1])
local session = 'session:' .. ARGV[2]
if redis.call('HGET', KEYS[1], session) == ARGV[1] then redis.call('HDEL', KEYS[1], session) end
"""
"""KEYS: the hash, then the keys of the process once it has ended, if it is kept.

ARGV: the number of the process, and of its session; where it is kept, the process, and for how many seconds.
"""

ENDED_S = 30
"""Seconds for which a process that has ended can be joined, as at E2B."""


class Program(BaseModel):
    """What a process runs; times are seconds since the epoch, `ends_at` is when it is ended at the latest.

    `terminal` are the rows and columns of its terminal, if it has one. `word` is random, and that of this process alone.
    """

    cmd: str
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None
    tag: str | None = None
    stdin: bool = False
    terminal: tuple[int, int] | None = None
    started_at: float
    ends_at: float | None = None
    word: str

    @property
    def is_interactive(self) -> bool:
        """Whether it can be given input."""
        return self.stdin or self.terminal is not None


class Process(BaseModel):
    """A process: its number, the session that it has, what it runs, and whether its input was closed."""

    pid: int
    session: int
    program: Program
    is_closed: bool = False

    @property
    def session_name(self) -> str:
        """The name of its shell session."""
        return session_name(self.session)

    @property
    def key(self) -> str:
        """The idempotency key of its action."""
        return f"e2b-process-{self.pid}-{self.program.word}"


def session_name(session: int) -> str:
    """Return the name of a session; the first one is that which all shapes use."""
    return "main" if session == 0 else f"e2b-{session}"


class Tables:
    """The processes of all sandboxes."""

    def __init__(self, store: Redis) -> None:
        self.store = store
        self.hold = store.register_script(_HOLD)
        self.begin = store.register_script(_BEGIN)
        self.remove = store.register_script(_REMOVE)
        self.removing: dict[asyncio.Future[None], str] = {}
        """Done once a process is removed, with the key of its sandbox: calls of this copy of the gateway find no process that has ended."""

    def of(self, sandbox: str) -> Table:
        """Return those of one sandbox."""
        return Table(self, sandbox)


class Table:
    """The processes of one sandbox. Every method raises what redis-py raises."""

    def __init__(self, tables: Tables, sandbox: str) -> None:
        self._store, self._removing = tables.store, tables.removing
        self._hold, self._begin, self._remove = tables.hold, tables.begin, tables.remove
        self._keys = [PROCESSES_PREFIX + sandbox, record_key(sandbox), SHELLS_PREFIX + sandbox]
        self._key = self._keys[0]
        self._killed, self._ended = f"tangram-gw-e2b-killed-{sandbox}-", f"tangram-gw-e2b-ended-{sandbox}-"

    async def begin(self, program: Program, access_token: str) -> tuple[Record | None, Process | None]:
        """Read the record of the sandbox, and give a number and a session to what is to run there, in one step.

        There is no process where there is no record, the sandbox is not open, or the token is not that of the sandbox.
        """
        await self._settled()
        listed = program.model_dump_json(exclude_defaults=True)
        pid, session, *raw = await self._begin(keys=self._keys, args=[KEPT_S, PIDS, listed, access_token])
        record = Record.model_validate_json(raw[0]) if raw else None
        return record, Process(pid=pid, session=session, program=program) if pid else None

    async def end(self, process: Process) -> None:
        """Remove a process that has ended, which `ended` finds for `ENDED_S` from its first removal on."""
        names = [str(process.pid), *([f"tag-{process.program.tag}"] if process.program.tag else [])]
        await self.remove(process, [self._ended + name for name in names])

    async def ended(self, pid: int, tag: str) -> Process | None:
        """Return the process of a number, or the last one of a tag, that has ended lately; None where there is none."""
        raw = await self._store.get(self._ended + (f"tag-{tag}" if tag else str(pid)))
        return None if raw is None else Process.model_validate_json(raw)

    async def remove(self, process: Process, kept: Sequence[str] = ()) -> None:
        """Take the number and the session of a process back; what this copy of the gateway asks meanwhile waits for that.

        `kept` are keys under which it is still found for `ENDED_S`.
        """
        listed: list[str | int] = [process.model_dump_json(exclude_defaults=True), ENDED_S] if kept else []
        removed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._removing[removed] = self._key
        try:
            await self._remove(keys=[self._key, *kept], args=[process.pid, process.session, *listed])
        finally:
            del self._removing[removed]
            removed.set_result(None)

    @asynccontextmanager
    async def unlisted_session(self, family: str = "") -> AsyncIterator[str]:
        """Hold a session for something that is no process; its name, which begins with `family` where that is not E2B's."""
        number, session = await self._hold(keys=self._keys, args=[KEPT_S, PIDS])
        try:
            yield f"{family}-{session}" if family else session_name(session)
        finally:
            with suppress(RedisError):  # a session that stays taken is worth less than the result of what ran in it
                await self._remove(keys=[self._key], args=[number, session])

    async def find(self, pid: int) -> Process | None:
        """Return a process; None where no such process runs."""
        await self._settled()
        fields = [f"process:{pid}", f"closed:{pid}"]
        raw, closed = await cast(Awaitable[list[bytes | None]], self._store.hmget(self._key, fields))
        return None if raw is None else _process(pid, raw, closed is not None)

    async def note_killed(self, process: Process) -> None:
        """Note that somebody kills a process."""
        await self._store.set(self._killed + process.program.word, 1, ex=RESULT_TTL_S)

    async def was_killed(self, process: Process) -> bool:
        """Say whether somebody has killed a process."""
        return bool(await self._store.exists(self._killed + process.program.word))

    async def note_closed(self, process: Process) -> None:
        """Note that somebody has closed the input of a process."""
        await self._store.hset(self._key, f"closed:{process.pid}", "1")

    async def all(self) -> list[Process]:
        """Return the processes that run, by number."""
        await self._settled()
        raws = await cast(Awaitable[dict[bytes, bytes]], self._store.hgetall(self._key))
        found = [(name.decode().partition(":"), raw) for name, raw in raws.items()]
        processes = (_process(int(pid), raw, f"closed:{pid}".encode() in raws) for (kind, _, pid), raw in found if kind == "process")
        return sorted(processes, key=lambda one: one.pid)

    async def _settled(self) -> None:
        """Wait until the processes are removed whose end is known."""
        if removals := [removed for removed, key in self._removing.items() if key == self._key]:
            await asyncio.wait(removals)


def _process(pid: int, raw: bytes, is_closed: bool) -> Process:
    session, _, program = raw.partition(b" ")
    return Process(pid=pid, session=int(session), program=Program.model_validate_json(program), is_closed=is_closed)
