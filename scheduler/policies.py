"""The policies by name: `elastic`, `paper`, `fcfs`, `fixed:N`, `static:N`.

A policy consists of the rules of the queues (`scheduler/model/rules.py`), a dispatcher for cores and a dispatcher for GPU cells.

| policy | cores | GPU cells |
|---|---|---|
| `elastic` | handed over by expected work left, grown by marginal gain | actions of a service share a swap |
| `paper` | in order, amounts by the published algorithm | on demand, likewise |
| `fcfs` | in order, everyone on the smallest amount | on demand, likewise |
| `fixed:N` | in order, everyone on N units | on demand, likewise |
| `static:N` | in order, within pods of N cores | each service owns an equal part of the cells |

Each part of `elastic` (docs/scheduling.md) can be switched off, to measure its worth.

For cells and quotas, `elastic` orders actions by their arrival, put forward by one *window* (`Limits.window_s`) for each class of
priority. So no action starves. An action of a class higher by n overtakes another of its job only if it comes at most n windows
later.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from scheduler.choosing.abstract import Chooser
from scheduler.choosing.simple import Fixed, InPod, Minimum
from scheduler.cpu.elastic import ElasticCores
from scheduler.cpu.in_order import InOrderCores
from scheduler.cpu.pool import MakeDispatcher as MakeCoreDispatcher
from scheduler.gpu.elastic import ElasticCells
from scheduler.gpu.on_demand import OnDemandCells
from scheduler.gpu.pool import MakeDispatcher as MakeCellDispatcher
from scheduler.gpu.static import StaticCells
from scheduler.model.rules import Rules
from tangram.errors import TangramError

NAMES: Final = ("elastic", "paper", "fcfs", "fixed:N", "static:N")

PARTS: Final = ("preemption", "resizing", "shrinking", "learning", "shares", "services", "sharing", "memory")
"""The parts of `elastic`."""

DEPTH: Final = 16
"""Waiting actions in `paper`'s estimate of the total completion time, as published."""

MOST_UNITS: Final = 100_000
"""The largest N of a name."""


class UnknownPolicy(TangramError, ValueError):
    """Raised when no policy has the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One way of scheduling: its name, its rules, and the makers of its dispatchers."""

    name: str
    rules: Rules
    cores: MakeCoreDispatcher
    cells: MakeCellDispatcher


def make_policy(name: str, *, depth: int = DEPTH, without: Collection[str] = ()) -> Policy:
    """Build the policy called `name`. `without` lists the parts (`PARTS`) of `elastic` to switch off.

    Raises `UnknownPolicy` when no policy has the name, N is not a whole number above 0, or the policy lacks a part of `without`.
    """
    unknown = [part for part in without if name != "elastic" or part not in PARTS]
    if unknown:
        raise UnknownPolicy(f"policy {name!r} has no part {unknown[0]!r} to go without; elastic has {', '.join(PARTS)}")
    kind, colon, number = name.partition(":")
    if kind in ("fixed", "static") and colon:
        if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= MOST_UNITS:
            raise UnknownPolicy(f"policy {name!r}: N must be a whole number from 1 to {MOST_UNITS}")
        return _in_order(f"fixed:{int(number)}", Fixed(int(number))) if kind == "fixed" else _static(int(number))
    if name == "elastic":
        return _elastic(without)
    if name == "paper":
        return _in_order(name, _paper(depth))
    if name == "fcfs":
        return _in_order(name, Minimum())
    raise UnknownPolicy(f"policy {name!r} is none of {', '.join(NAMES)}")


def _elastic(without: Collection[str]) -> Policy:
    services, shrinks = "services" not in without, not {"resizing", "shrinking"} & set(without)
    rules = Rules(
        by_window=True,
        ranks=True,
        profiled=False,
        learns="learning" not in without,
        shares="shares" not in without,
        preempts="preemption" not in without,
        resizes="resizing" not in without,
        shares_cells=services and "sharing" not in without,
        grants_memory="memory" not in without,
    )
    return Policy(
        name="elastic",
        rules=rules,
        cores=lambda pool: ElasticCores(pool, shrinks=shrinks),
        cells=ElasticCells if services else lambda pool: OnDemandCells(pool, _paper(DEPTH)),
    )


def _paper(depth: int) -> Chooser:
    from scheduler.choosing.paper import Paper  # numpy makes the start of a process longer, and only this policy needs it

    return Paper(depth)


def _in_order(name: str, chooser: Chooser) -> Policy:
    return Policy(
        name=name,
        rules=Rules(),
        cores=lambda pool: InOrderCores(pool, chooser),
        cells=lambda pool: OnDemandCells(pool, chooser),
    )


def _static(cores: int) -> Policy:
    return Policy(
        name=f"static:{cores}",
        rules=Rules(pod_cores=cores, owned_cells=True),
        cores=lambda pool: InOrderCores(pool, InPod()),
        cells=StaticCells,
    )
