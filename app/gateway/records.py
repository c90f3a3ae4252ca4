"""Records of environments in the result store: what every process of a gateway knows of them.

| key | holds |
|---|---|
| `tangram-gw-env-<id>` | the record, JSON; lives for `KEPT_S` beyond its lease or its last use |
| `tangram-gw-lease-<id>` | there while a process renews the lease of an environment |
| `tangram-gw-name-<digest>` | the id of the environment that a job has under a name or an idempotency key |
| `tangram-gw-e2b-<id>`, `tangram-gw-rex-<id>` | what shapes know of its processes and shells; they live and go with the record |

A record is written before the environment is opened, so that of two processes with the same key one opens and both wait.

The store may lose its data. So a process keeps the records of open environments that it has read or written, at most `MOST_KEPT`. What is
missing in the store is written there again, with its names, if the environment still stands by the journal.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from typing import Literal, TypedDict

from pydantic import BaseModel, ConfigDict
from redis.asyncio import Redis
from redis.asyncio.lock import Lock

from app.gateway.errors import BadRequest
from app.gateway.journal import Journal
from app.gateway.sessions import digest
from app.journal.models import Environment
from tangram.calls import Place

KEPT_S = 24 * 3600
"""Seconds for which a record outlives its environment's lease, or its last use where it has none."""

MOST_CPUS = 1024
"""The most cores that a command may be said to be able to use."""

MOST_KEPT = 20_000
"""The records that a process keeps in memory, of about 1 KB each."""

LOCKED_S = 30.0
"""Seconds after which a lock of a process that has died is free again."""

PROCESSES_PREFIX, SHELLS_PREFIX = "tangram-gw-e2b-", "tangram-gw-rex-"

_log = logging.getLogger(__name__)
_PREFIX = "tangram-gw-env-"
_LOCK_PREFIX = "tangram-gw-lease-"
_NAME_PREFIX = "tangram-gw-name-"

_READ = """
local raw = redis.call('GET', KEYS[1])
if not raw then return raw end
for _, key in ipairs(KEYS) do
  if redis.call('TTL', key) < tonumber(ARGV[1]) then redis.call('EXPIRE', key, ARGV[1]) end
end
return raw
"""
"""KEYS: the record, what goes with it. ARGV: the seconds to keep them at least."""

_CHANGE = """
if not redis.call('SET', KEYS[1], ARGV[1], 'XX', 'EX', ARGV[2]) then return 0 end
for i = 2, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[2]) end
return 1
"""
"""KEYS: the record, what goes with it, its names. ARGV: the record, the seconds to keep them."""

_FORGET = """
for i = 4, #KEYS do if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) end end
redis.call('DEL', KEYS[2], KEYS[3])
return redis.call('DEL', KEYS[1])
"""
"""KEYS: the record, what goes with it, the names that may lead to it. ARGV: its id. Names that lead to another environment stay."""


class Wanted(TypedDict, total=False):
    """What an environment is to be.

    It is made from `image`, which the caller calls `template`, and belongs to the rollout `trajectory`, by default one of its own id.
    Its node must have the labels `requires`. A command of it may use at most `cpus` cores. `metadata`, `owner` and `variables`, the
    environment variables that its commands are to have, are kept with it for the shape. `name` is one within the job. It is closed
    `lease_s` seconds after it stands, unless its lease is renewed; without a lease, once it is unused.
    """

    trajectory: str
    image: str | None
    template: str
    memory_mb: int | None
    cpus: int
    requires: tuple[str, ...]
    metadata: dict[str, str]
    variables: dict[str, str]
    owner: str
    name: str
    lease_s: float | None


class Record(BaseModel):
    """What is known of an environment, besides what was `Wanted`; times are seconds since the epoch.

    `opened_image` is what its node was asked for: nothing where nodes have no images. `ends_at` is the end of its lease, absent where the
    scheduler's own lease is all that it has. `access_token` gives access to this environment alone. `names` are those under which it can be
    found.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    job: str
    trajectory: str
    open_id: str
    state: Literal["opening", "open"] = "opening"
    image: str | None = None
    opened_image: str | None = None
    template: str = ""
    memory_mb: int | None = None
    cpus: int = 1
    requires: tuple[str, ...] = ()
    metadata: dict[str, str] = {}
    variables: dict[str, str] = {}
    owner: str = ""
    name: str = ""
    names: tuple[str, ...] = ()
    created_at: float
    lease_s: float | None = None
    ends_at: float | None = None
    access_token: str

    @property
    def place(self) -> Place:
        """Where its actions belong."""
        return Place(self.job, self.trajectory, self.id)

    @property
    def units(self) -> tuple[int, ...]:
        """The numbers of cores that a command of it may run on: up to `cpus`.

        What was opened through the native API says it in its metadata, under that name. Metadata of other shapes are any text.
        Raises `BadRequest` where they say no number.
        """
        said = str(self.cpus) if self.owner else self.metadata.get("cpus", str(self.cpus))
        if not said.isascii() or not said.isdigit() or len(said) > len(str(MOST_CPUS)) or not 1 <= int(said) <= MOST_CPUS:
            raise BadRequest(f"cpus: the environment's metadata must have a whole number from 1 to {MOST_CPUS} there, not {said!r}")
        return tuple(range(1, int(said) + 1))

    @property
    def kept_s(self) -> int:
        """Seconds for which the record is kept from now on."""
        return KEPT_S + (max(0, int(self.ends_at - time.time())) if self.ends_at is not None else 0)


class Records:
    """Reads and writes records. Every method raises what redis-py raises, and `InfraFailed` when the journal is needed and is away."""

    def __init__(self, store: Redis, journal: Journal) -> None:
        """Keep them in `store`; the `journal` says which of those that the store has lost still stand."""
        self._store, self._journal = store, journal
        self._kept: OrderedDict[str, Record] = OrderedDict()
        self._named: dict[str, str] = {}
        """The ids of the kept records by their names."""
        self._read = store.register_script(_READ)
        self._change = store.register_script(_CHANGE)
        self._forget = store.register_script(_FORGET)

    async def enter(self, record: Record) -> None:
        """Write a new record."""
        await self._store.set(_PREFIX + record.id, record.model_dump_json(exclude_defaults=True), ex=record.kept_s)
        self.note(record)

    async def adopt(self, job: str, environment: str, known: Environment) -> Record:
        """Write a record of an environment that was opened elsewhere, or return the one that another process has written."""
        record = Record(
            id=environment,
            job=job,
            trajectory=known.trajectory,
            open_id="",
            state="open",
            created_at=known.created_at,
            ends_at=known.ends_at,
            access_token=secrets.token_urlsafe(24),
        )
        return await self._enter_unless_there(record)

    async def _enter_unless_there(self, record: Record) -> Record:
        await self._store.set(_PREFIX + record.id, record.model_dump_json(exclude_defaults=True), nx=True, ex=record.kept_s)
        return await self.read(record.id) or record

    async def change(self, record: Record) -> bool:
        """Write a record anew, unless it was removed meanwhile; say whether it was there."""
        content = record.model_dump_json(exclude_defaults=True)
        was_there = bool(await self._change(keys=[*_keys(record.id), *record.names], args=[content, record.kept_s]))
        if was_there:
            self.note(record)
        return was_there

    def alone(self, environment: str) -> Lock:
        """Return what keeps others, in whatever process, from renewing the lease of an environment meanwhile: a context manager."""
        return self._store.lock(_LOCK_PREFIX + environment, timeout=LOCKED_S, sleep=0.01)

    async def read(self, environment: str) -> Record | None:
        """Return a record and keep it longer; None where there is none."""
        raw = await self._read(keys=_keys(environment), args=[KEPT_S])
        return await self._restored(environment) if raw is None else self.note(Record.model_validate_json(raw))

    async def read_all(self, environments: list[str]) -> list[Record]:
        """Return those records that there are."""
        raws = await self._store.mget([_PREFIX + one for one in environments]) if environments else []
        found = [
            await self._restored(one) if raw is None else self.note(Record.model_validate_json(raw))
            for one, raw in zip(environments, raws, strict=True)
        ]
        return [record for record in found if record is not None]

    def note(self, record: Record) -> Record:
        """Keep the record of an open environment in memory, and return it."""
        self._drop(record.id)
        if record.state == "open":
            self._kept[record.id] = record
            self._named |= dict.fromkeys(record.names, record.id)
            if len(self._kept) > MOST_KEPT:
                self._drop(next(iter(self._kept)))
        return record

    def _drop(self, environment: str) -> None:
        known = self._kept.pop(environment, None)
        for name in known.names if known is not None else ():
            if self._named.get(name) == environment:
                del self._named[name]

    async def _restored(self, environment: str) -> Record | None:
        """Write a record again that the store has lost, and its names; None where it is not known, or the environment stands no longer."""
        known = self._kept.get(environment)
        if known is None:
            return None
        standing = await self._journal.standing(known.job, environment)
        if standing is None:
            self._drop(environment)
            return None
        _log.warning("the result store has lost the record of environment %s, which is written again", environment)
        for name in known.names:
            await self._store.set(name, known.id, nx=True, ex=known.kept_s)
        return await self._enter_unless_there(known.model_copy(update={"ends_at": standing.ends_at or known.ends_at}))

    async def claim(self, name: str, record: Record) -> str:
        """Have a name lead to a record unless it leads to another, also to one that the store has lost; return the id that it leads to."""
        if (known := await self.id_of(name)) is not None:
            return known
        while not await self._store.set(name, record.id, nx=True, ex=record.kept_s):
            found = await self._store.get(name)
            if found is not None:
                return _text(found)
        return record.id

    async def keep(self, name: str, record: Record) -> None:
        """Keep a name for as long as its record, from now on."""
        await self._store.expire(name, record.kept_s)

    async def id_of(self, name: str) -> str | None:
        """Return the id that a name leads to."""
        found = await self._store.get(name)
        if found is not None:
            return _text(found)
        known = self._named.get(name)
        return None if known is None or await self._restored(known) is None else known

    async def forget(self, environment: str, names: tuple[str, ...] = ()) -> bool:
        """Remove a record and its names; say whether there was one."""
        self._drop(environment)
        return bool(await self._forget(keys=[*_keys(environment), *names], args=[environment]))


def name_key(job: str, kind: str, name: str) -> str:
    """Return the key under which a job's environment is found by a name; `kind` tells names from idempotency keys."""
    return _NAME_PREFIX + digest(job, kind, name)


def record_key(environment: str) -> str:
    """Return the key of a record."""
    return _PREFIX + environment


def _keys(environment: str) -> list[str]:
    """Return the keys of a record and of what goes with it."""
    return [record_key(environment), PROCESSES_PREFIX + environment, SHELLS_PREFIX + environment]


def _text(raw: object) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)
