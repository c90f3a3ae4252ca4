"""Shards: several schedulers on the same broker, result store and database, each with nodes of its own.

| what | belongs to the shard |
|---|---|
| a node | that its worker is started with (`TANGRAM_SHARD`) |
| an environment, with all its actions | that the hash of its id names |
| an action that wants GPU cells or draws on a quota | 0 |
| any other action | that the hash of its own id names |
| a cancel or what is given, for an action that this client waits for | that of the action |
| another cancel, a drain | all of them: those that do not know of it do nothing |

`TANGRAM_SHARDS` is how many there are. It is the same for everybody, and changes only while no environment is open. Each shard says
twice a second what it carries (`tangram.wire.WireLoad`). A client reads that with each of its signs of life. An id of an environment is
made up until it belongs to the shard that carries least. Who knows no loads makes up any id: that costs balance alone.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any, Final
from zlib import crc32

from redis import Redis

from tangram.action import CELLS, GPU_KINDS, QUOTA_PREFIX, Action
from tangram.wire import LOAD_KEY, LOAD_TTL_S, WireLoad, of_shard

FIRST: Final = 0
"""The shard that has what there is once: GPU cells, quotas, and the removal of what is too old."""


def shard_of(name: str, shards: int) -> int:
    """Return the shard that an environment of this id belongs to, or an action of none."""
    return crc32(name.encode("utf-8", "surrogatepass")) % shards


def shard_of_action(action_id: str, action: Action, shards: int) -> int:
    """Return the shard that an action belongs to."""
    if action.environment is not None:
        return shard_of(action.environment, shards)
    is_first = action.kind in GPU_KINDS or any(name == CELLS or name.startswith(QUOTA_PREFIX) for name in action.cost.amounts)
    return FIRST if is_first else shard_of(action_id, shards)


class Loads:
    """What the shards carried when a client looked last, and what it has opened on them since."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._known: dict[int, WireLoad] = {}
        self._opened: Counter[int] = Counter()

    def look(self, store: Redis) -> None:
        """Read what the shards say, where there are several. Raises what redis-py raises."""
        if self.shards > 1:
            self._known, self._opened = read_loads(store, range(self.shards)), Counter()

    def new_environment(self, requires: Iterable[str] = ()) -> str:
        """Make up the id of an environment on the shard that carries least of those with nodes of all these labels."""
        able = [shard for shard, load in self._known.items() if set(load["labels"]).issuperset(requires)]
        if not able:
            return _made_up()
        best = min(able, key=self._rank)
        self._opened[best] += 1
        while shard_of(made_up := _made_up(), self.shards) != best:
            pass
        return made_up

    def place(self, opening: Action) -> Action:
        """Return an open of an environment with such an id."""
        if not self._known:
            return opening
        made_up, before = self.new_environment(opening.requires), opening.environment
        trajectory = made_up if opening.trajectory == before else opening.trajectory
        return replace(opening, environment=made_up, trajectory=trajectory, arguments={**opening.arguments, "environment": made_up})

    def _rank(self, shard: int) -> tuple[bool, float]:
        """Where opens wait there is no room; else it goes by environments for each core, as among the nodes of a shard."""
        load = self._known[shard]
        stand = load["environments"] + load["opening"] + self._opened[shard]
        return load["opening"] > 0, stand / load["cores"] if load["cores"] else inf


def read_loads(store: Redis, shards: Iterable[int]) -> dict[int, WireLoad]:
    """Return what these shards carry, without those that do not say so. Raises what redis-py raises."""
    numbers = list(shards)
    raws: list[Any] = store.mget([of_shard(LOAD_KEY, shard) for shard in numbers])
    return {shard: json.loads(raw) for shard, raw in zip(numbers, raws, strict=True) if raw is not None}


def exchange_loads(store: Redis, shard: int, others: Iterable[int], load: WireLoad) -> list[WireLoad]:
    """Say what a shard carries, and return what the `others` do. Raises what redis-py raises."""
    store.set(of_shard(LOAD_KEY, shard), json.dumps(load), ex=LOAD_TTL_S)
    return list(read_loads(store, others).values())


def _made_up() -> str:
    return f"env-{secrets.token_hex(8)}"
