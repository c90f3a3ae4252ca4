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
twice a second what it carries (`tangram.wire.WireLoad`). A client reads that with each of its signs of life. To open an environment, a
client makes up ids until one belongs to the shard that carries least. If it knows no loads, it takes the first id. That costs balance
alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from random import random
from typing import Any, Final
from zlib import crc32

from redis import Redis

from tangram.action import CELLS, GPU_KINDS, MEMORY_MB, QUOTA_PREFIX, Action
from tangram.calls import make_up_environment
from tangram.errors import StackUnreachable
from tangram.life_signs import SIGN_S
from tangram.scheduler_watch import SchedulerWatch
from tangram.wire import LOAD_KEY, LOAD_TTL_S, SHARDS_KEY, WireLoad, is_node_label, of_shard

FIRST: Final = 0
"""The shard that has what there is once: GPU cells, quotas, and the removal of what is too old."""


def shard_of(name: str, shards: int) -> int:
    """Return the shard that an environment of this id belongs to, or an action of none."""
    return crc32(name.encode("utf-8", "surrogatepass")) % shards


def shard_of_action(action_id: str, action: Action, shards: int) -> int:
    """Return the shard that an action belongs to."""
    if action.environment is not None:
        return shard_of(action.environment, shards)
    return FIRST if action.kind in GPU_KINDS or are_of_first(action.cost.amounts) else shard_of(action_id, shards)


def are_of_first(resources: Iterable[str]) -> bool:
    """Return whether the first shard alone has some of these resources."""
    return any(name == CELLS or name.startswith(QUOTA_PREFIX) for name in resources)


class Loads:
    """What the shards carried when a client looked last, and what it has opened on them since."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self._watches = [SchedulerWatch(shard, shards, SIGN_S, "what is submitted waits") for shard in range(shards)]
        self._known: dict[int, WireLoad] = {}
        self._opened: Counter[int] = Counter()

    def check(self, store: Redis) -> None:
        """Raise `StackUnreachable` where the schedulers count other shards: nobody reads the queues of those that there are not."""
        counted: Any = store.get(SHARDS_KEY)
        if counted is not None and int(counted) != self.shards:
            raise StackUnreachable(f"TANGRAM_SHARDS is {self.shards} here, and {int(counted)} for the schedulers")

    def look(self, store: Redis) -> None:
        """Read which shards have a scheduler, and what they say where there are several. Raises what redis-py raises."""
        if self.shards > 1:
            self._known, self._opened = read_loads(store, range(self.shards)), Counter()
            for shard, watch in enumerate(self._watches):
                watch.saw(shard in self._known)
        else:
            self._watches[FIRST].look(store)

    def new_environment(self, requires: Iterable[str] = (), memory_mb: int = 0) -> str:
        """Make up an environment's id on the least loaded shard that has a node with all these labels and this memory.

        If no known shard has such a node, take a shard that says nothing: it may have one. If all are known, take one with nodes, which
        refuses the open.
        """
        known, needs = self._known, frozenset(requires)  # another thread looks meanwhile
        able = [shard for shard, load in known.items() if _may_hold(load, needs, memory_mb)]
        if able:
            # Many clients that begin at once see the same: where shards are alike, they are not all to open on the first one.
            best = min(able, key=lambda shard: (self._rank(shard, known[shard]), random()))
            self._opened[best] += 1
            among: Collection[int] = (best,)
        else:
            every = range(self.shards)
            silent, with_nodes = [shard for shard in every if shard not in known], [shard for shard, load in known.items() if load["kinds"]]
            among = silent or with_nodes or every
        while shard_of(made_up := make_up_environment(), self.shards) not in among:
            pass
        return made_up

    def place(self, opening: Action) -> Action:
        """Return an open of an environment with such an id."""
        if not self._known:
            return opening
        made_up, before = self.new_environment(opening.requires, opening.cost.least(MEMORY_MB)), opening.environment
        trajectory = made_up if opening.trajectory == before else opening.trajectory
        return replace(opening, environment=made_up, trajectory=trajectory, arguments={**opening.arguments, "environment": made_up})

    def _rank(self, shard: int, load: WireLoad) -> tuple[bool, bool, float]:
        """Rank a shard: first one whose nodes take environments, then one without waiting opens, then by environments for each core."""
        stand = load["environments"] + load["opening"] + self._opened[shard]
        return not load["cores"], load["opening"] > 0, stand / (load["cores"] or 1)


def _may_hold(load: WireLoad, requires: frozenset[str], memory_mb: int) -> bool:
    """Return whether a node of a shard has all these labels and so much memory. Of a node that is named, the memory is not looked at."""
    if not requires.issubset(load["labels"]):
        return False
    by_name = any(is_node_label(label) for label in requires)
    return by_name or any(requires.issubset(kind["labels"]) and memory_mb <= kind["memory_mb"] for kind in load["kinds"])


def read_loads(store: Redis, shards: Iterable[int]) -> dict[int, WireLoad]:
    """Return what these shards carry, without those that do not say so. Raises what redis-py raises."""
    numbers = list(shards)
    raws: list[Any] = store.mget([of_shard(LOAD_KEY, shard) for shard in numbers])
    return {shard: json.loads(raw) for shard, raw in zip(numbers, raws, strict=True) if raw is not None}


def exchange_loads(store: Redis, shard: int, shards: int, load: WireLoad) -> list[WireLoad]:
    """Say what one of so many shards carries, and return what the others do. Raises what redis-py raises."""
    store.set(of_shard(LOAD_KEY, shard), json.dumps(load), ex=LOAD_TTL_S)
    return list(read_loads(store, (other for other in range(shards) if other != shard)).values())
