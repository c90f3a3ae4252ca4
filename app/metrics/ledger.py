"""What waits, runs and stands now, as the journal's entries tell it.

The scheduler's thread adds entries, and a scrape reads; a lock keeps them apart. Each entry costs the same however much waits, and the
core is never asked. The ledger knows every unfinished action, for as long as it is unfinished.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from scheduler.live.entries import ActionResized, EnvironmentChanged, NodeChanged
from scheduler.model import GrantFacts
from scheduler.model.lifecycle import ENVIRONMENT, NODE_HELD

Group = tuple[str, str]
"""The labels of an action: its job, its kind."""

Direction = Literal["grow", "shrink", "preempt", "resume"]

SILENT = "silent"

T = TypeVar("T")


@dataclass(slots=True)
class Known:
    """An unfinished action, under the labels that it came in with; `environment` is empty without one."""

    group: Group
    submitted_at: float
    environment: str = ""
    node: str = ""
    core_ids: tuple[int, ...] = ()
    cell_ids: tuple[int, ...] = ()
    background: bool = False
    runs: bool = False


@dataclass(slots=True)
class Queue:
    """The waiting actions of one group, in the order in which they came; those that came back stand apart. One that is empty stays."""

    first_time: OrderedDict[str, float] = field(default_factory=OrderedDict)
    again: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.first_time) + len(self.again)

    def drop(self, action_id: str) -> None:
        """Take an action out."""
        if self.first_time.pop(action_id, None) is None:
            self.again.pop(action_id, None)

    def oldest(self) -> float | None:
        """Return when the action that waits longest was submitted."""
        first = next(iter(self.first_time.values()), None)
        return min([*self.again.values(), *([first] if first is not None else [])], default=None)


@dataclass(slots=True)
class Units:
    """The cores and cells of a node, and how many actions are on each that is granted; cores by environment."""

    cores: int
    cells: int
    cores_held: Counter[tuple[str, int]] = field(default_factory=Counter)
    cells_held: Counter[int] = field(default_factory=Counter)


class Ledger:
    """The unfinished actions, the nodes and the environments. Not safe for threads by itself."""

    def __init__(self) -> None:
        self.actions: dict[str, Known] = {}
        self.queues: dict[Group, Queue] = {}
        self.running: Counter[Group] = Counter()
        self.nodes: dict[str, Units] = {}
        self.draining: set[str] = set()
        self.silent: set[str] = set()
        self.environments: dict[str, str] = {}
        self.pods: dict[str, tuple[str, int]] = {}
        """The node and the number of cores of each environment that has cores of its own."""

    def receive(self, action_id: str, group: Group, submitted_at: float, environment: str = "") -> None:
        """Have an action wait."""
        self.actions[action_id] = Known(group, submitted_at, environment)
        self.queues.setdefault(group, Queue()).first_time[action_id] = submitted_at

    def grant(self, action_id: str, grant: GrantFacts) -> Known | None:
        """Have an action run; return it where it is known."""
        known = self.actions.get(action_id)
        if known is None:
            return None
        self._stop(action_id, known)
        known.runs, known.node, known.background = True, grant.node, grant.background
        self.running[known.group] += 1
        self._hold(known, grant.core_ids, grant.cell_ids)
        return known

    def resize(self, entry: ActionResized) -> tuple[Known, Direction] | None:
        """Change the cores of an action; return it, and which way it went."""
        known = self.actions.get(entry.id)
        if known is None or not known.runs:
            return None
        direction: Direction = "grow" if len(entry.core_ids) > len(known.core_ids) else "shrink"
        if entry.background != known.background:
            direction = "preempt" if entry.background else "resume"
        self._hold(known, entry.core_ids, known.cell_ids)
        known.background = entry.background
        return known, direction

    def requeue(self, action_id: str) -> Known | None:
        """Have an action wait again; return it where it is known."""
        known = self.actions.get(action_id)
        if known is not None:
            self._stop(action_id, known)
            self.queues[known.group].again[action_id] = known.submitted_at
        return known

    def end(self, action_id: str) -> Known | None:
        """Forget an action; return it where it was known."""
        known = self.actions.pop(action_id, None)
        if known is not None:
            self._stop(action_id, known)
        return known

    def forget_job(self, job: str) -> None:
        """Forget the groups of a job that has no unfinished action."""
        self.queues = {group: queue for group, queue in self.queues.items() if group[0] != job}

    def _stop(self, action_id: str, known: Known) -> None:
        """Take an action out of its queue, or from what it holds."""
        if not known.runs:
            self.queues[known.group].drop(action_id)
            return
        self._hold(known, (), ())
        known.runs = False
        self.running[known.group] -= 1

    def _hold(self, known: Known, core_ids: tuple[int, ...], cell_ids: tuple[int, ...]) -> None:
        node = self.nodes.get(known.node)
        if node is not None:
            before, after = ([(known.environment, core) for core in cores] for cores in (known.core_ids, core_ids))
            _move(node.cores_held, before, after)
            _move(node.cells_held, known.cell_ids, cell_ids)
        known.core_ids, known.cell_ids = core_ids, cell_ids

    def change_node(self, entry: NodeChanged) -> None:
        """Take a node up, silent or not, or forget it."""
        (self.silent.add if entry.state == SILENT else self.silent.discard)(entry.name)
        if entry.state not in NODE_HELD:
            self.nodes.pop(entry.name, None)
            return
        cores, cells = (_count(entry.description.get(name)) for name in ("cores", "cells"))
        units = self.nodes.setdefault(entry.name, Units(cores, cells))
        units.cores, units.cells = cores, cells

    def drain(self, name: str, *, draining: bool) -> None:
        """Note whether a node drains, up or not."""
        (self.draining.add if draining else self.draining.discard)(name)

    def change_environment(self, entry: EnvironmentChanged) -> bool:
        """Note an environment's state and what it has for itself; return whether that is an end."""
        self.pods.pop(entry.id, None)
        if entry.state in ENVIRONMENT.ends:
            return self.environments.pop(entry.id, None) is not None
        self.environments[entry.id] = entry.state
        if entry.node is not None and entry.pod_cores:
            self.pods[entry.id] = entry.node, entry.pod_cores
        return False

    def units(self) -> Iterator[tuple[str, str, str, int]]:
        """Yield node, resource, state and number of the units of all nodes.

        Cores of a pod are granted for as long as its environment stands, whether an action runs on them or not.
        """
        pods = Counter[str]()
        for name, cores in self.pods.values():
            pods[name] += cores
        for name, node in self.nodes.items():
            outside = {core for environment, core in node.cores_held if environment not in self.pods}
            granted = {"cores": len(outside) + pods[name], "cells": len(node.cells_held)}
            for resource, offered in (("cores", node.cores), ("cells", node.cells)):
                if offered:
                    yield name, resource, "granted", granted[resource]
                    yield name, resource, "idle", max(0, offered - granted[resource])


def _move(held: Counter[T], before: Iterable[T], after: Iterable[T]) -> None:
    for unit in before:
        held[unit] -= 1
        if held[unit] <= 0:
            del held[unit]
    for unit in after:
        held[unit] += 1


def _count(said: object) -> int:
    return said if isinstance(said, int) else 0
