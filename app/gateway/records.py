"""Records of environments in the result store: what every process of a gateway knows of them.

| key | holds |
|---|---|
| `tangram-gw-env-<id>` | the record, JSON; lives for `KEPT_S` beyond its lease or its last use |
| `tangram-gw-name-<digest>` | the id of the environment that a job has under a name or an idempotency key |
| `tangram-gw-leases` | sorted set: ids by the time at which their lease is over |

A record is written before the environment is opened, so that of two processes with the same key one opens and both wait.
"""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, ConfigDict
from redis.asyncio import Redis

from app.gateway.sessions import digest
from tangram.calls import Place

KEPT_S = 24 * 3600
"""Seconds for which a record outlives its environment's lease, or its last use where it has none."""

_PREFIX = "tangram-gw-env-"
_NAME_PREFIX = "tangram-gw-name-"
_LEASES = "tangram-gw-leases"

_CHANGE = """
if not redis.call('SET', KEYS[1], ARGV[2], 'XX', 'EX', ARGV[3]) then return 0 end
for i = 3, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1]) end
return 1
"""
"""KEYS: the record, the leases, its names. ARGV: its id, the record, the seconds to keep it, the end of its lease if it has one."""

_FORGET = """
for i = 3, #KEYS do if redis.call('GET', KEYS[i]) == ARGV[1] then redis.call('DEL', KEYS[i]) end end
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
"""
"""KEYS: the record, the leases, the names that may lead to it. ARGV: its id. Names that lead to another environment stay."""


class Record(BaseModel):
    """What is known of an environment; times are seconds since the epoch.

    `image` is what was asked for, `opened_image` what its node was asked for: nothing where nodes have no images. `lease_s` is the
    lease that it was opened with, `ends_at` the end of it; both absent where the scheduler's own lease is all that it has.
    `access_token` gives access to this environment alone. `names` are those under which it can be found.
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
    def kept_s(self) -> int:
        """Seconds for which the record is kept from now on."""
        return KEPT_S + (max(0, int(self.ends_at - time.time())) if self.ends_at is not None else 0)


class Records:
    """Reads and writes records. Every method raises what redis-py raises."""

    def __init__(self, store: Redis) -> None:
        """Keep them in `store`."""
        self._store = store
        self._change = store.register_script(_CHANGE)
        self._forget = store.register_script(_FORGET)

    async def enter(self, record: Record) -> None:
        """Write a new record, and the end of its lease."""
        await self._store.set(_PREFIX + record.id, record.model_dump_json(exclude_defaults=True), ex=record.kept_s)
        if record.ends_at is not None:
            await self._store.zadd(_LEASES, {record.id: record.ends_at})

    async def change(self, record: Record) -> bool:
        """Write a record anew, and the end of its lease, unless it was removed meanwhile; say whether it was there."""
        content = record.model_dump_json(exclude_defaults=True)
        keys = [_PREFIX + record.id, _LEASES, *record.names]
        return bool(await self._change(keys=keys, args=[record.id, content, record.kept_s, record.ends_at or ""]))

    async def read(self, environment: str) -> Record | None:
        """Return a record and keep it longer; None where there is none."""
        raw = await self._store.getex(_PREFIX + environment, ex=KEPT_S)
        if raw is None:
            return None
        record = Record.model_validate_json(raw)
        if record.ends_at is not None:
            await self._store.expire(_PREFIX + environment, record.kept_s)
        return record

    async def read_all(self, environments: list[str]) -> list[Record]:
        """Return those records that there are."""
        raws = await self._store.mget([_PREFIX + one for one in environments]) if environments else []
        return [Record.model_validate_json(raw) for raw in raws if raw is not None]

    async def claim(self, name: str, record: Record) -> str:
        """Have a name lead to a record unless it leads to another; return the id that it leads to."""
        while not await self._store.set(name, record.id, nx=True, ex=record.kept_s):
            found = await self._store.get(name)
            if found is not None:
                return _text(found)
        return record.id

    async def id_of(self, name: str) -> str | None:
        """Return the id that a name leads to."""
        found = await self._store.get(name)
        return None if found is None else _text(found)

    async def forget(self, environment: str, names: tuple[str, ...] = ()) -> bool:
        """Remove a record and its names; say whether there was one."""
        return bool(await self._forget(keys=[_PREFIX + environment, _LEASES, *names], args=[environment]))

    async def overdue(self, now: float, most: int) -> list[str]:
        """Return the ids whose lease is over."""
        found = await self._store.zrangebyscore(_LEASES, "-inf", now, start=0, num=most)
        return [_text(one) for one in found]


def name_key(job: str, kind: str, name: str) -> str:
    """Return the key under which a job's environment is found by a name; `kind` tells names from idempotency keys."""
    return _NAME_PREFIX + digest(job, kind, name)


def _text(raw: object) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)
