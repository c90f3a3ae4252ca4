"""The simulator's own books of the cells of all nodes. They follow from grants alone, and are independent of the core's books.

They reject what real cells would not allow: two instances that compute on one cell at a time; more residents than a cell's memory
holds; the eviction of a busy or absent instance; an action on an instance that was not restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scheduler.model import UNLIMITED, Evicted, Grant, NodeSpec, ServiceSpec
from scheduler.model.commands import Restore

Named = tuple[str, tuple[int, ...]]
"""An instance on its node: service and cells."""


class BrokenGrant(RuntimeError):
    """Raised when a grant cannot be carried out on cells."""


class CellBooks:
    """Residents and runners by node. With `preloaded`, services own their cells from the start and are never restored."""

    def __init__(self, services: Mapping[str, ServiceSpec], *, preloaded: bool = False) -> None:
        self._services = services
        self._preloaded = preloaded
        self._memory_mb: dict[str, int] = {}
        self._resident: dict[str, dict[Named, int]] = {}
        self._runs: dict[str, tuple[str, Named]] = {}

    def join(self, spec: NodeSpec) -> None:
        """Take in a node, on which nothing is resident."""
        self._memory_mb[spec.name] = spec.cell_memory_mb
        self._resident[spec.name] = {}
        self._runs = {action_id: at for action_id, at in self._runs.items() if at[0] != spec.name}

    def start(self, action_id: str, service: str, grant: Grant) -> None:
        """Carry out a grant of cells. Raises `BrokenGrant`."""
        named = (service, grant.cell_ids)
        there = named in self._resident[grant.node]
        if there and grant.evict:
            raise BrokenGrant(f"{service} is there, and others are evicted for it")
        if not there and not grant.restore and not self._preloaded:
            raise BrokenGrant(f"{service} runs on cells {grant.cell_ids} of {grant.node}, where it is not resident")
        if grant.restore and there:
            raise BrokenGrant(f"{service} is restored onto cells {grant.cell_ids} of {grant.node}, where it is resident")
        if not there:
            self._bring(grant.node, named, grant.evict)
        self._compute(action_id, grant.node, named)

    def restore(self, command: Restore) -> str:
        """Carry out a restore, and return its name. It keeps its cells until `finish` of this name. Raises `BrokenGrant`."""
        named = (command.service, command.cell_ids)
        if named in self._resident[command.node]:
            raise BrokenGrant(f"{command.service} is restored onto cells {command.cell_ids} of {command.node}, where it is resident")
        self._bring(command.node, named, command.evict)
        name = f"restore of {command.service} onto {command.cell_ids} of {command.node}"
        self._compute(name, command.node, named)
        return name

    def finish(self, action_id: str) -> None:
        """Note that an action has ended."""
        self._runs.pop(action_id, None)

    def running(self, node: str, named: Named) -> int:
        """Count the actions that an instance runs."""
        return sum(at == (node, named) for at in self._runs.values())

    def _bring(self, node: str, named: Named, evicted: Sequence[Evicted]) -> None:
        resident = self._resident[node]
        for one in evicted:
            gone = (one.service, one.cell_ids)
            if gone not in resident:
                raise BrokenGrant(f"{one.service} is evicted from cells {one.cell_ids} of {node}, where it is not resident")
            if self.running(node, gone):
                raise BrokenGrant(f"{one.service} is evicted from cells {one.cell_ids} of {node} while it runs something")
            if self._services[one.service].pinned:
                raise BrokenGrant(f"{one.service} is pinned, and evicted")
            del resident[gone]
        service, cell_ids = named
        resident[named] = self._need_mb(node, service)
        for cell in cell_ids:
            on = {other: need_mb for other, need_mb in resident.items() if cell in other[1]}
            if sum(on.values()) > self._memory_mb[node] and len(on) > 1:
                raise BrokenGrant(f"{service} is brought onto cell {cell} of {node}, which has no memory for it beside {_listed(on)}")
            if [name for name, _ in on].count(service) > 1:
                raise BrokenGrant(f"{service} is on cell {cell} of {node} twice")
        most = self._services[service].instances_per_node
        if most is not None and not self._preloaded and sum(name == service for name, _ in resident) > most:
            raise BrokenGrant(f"{node} holds more than {most} instances of {service}")

    def _need_mb(self, node: str, service: str) -> int:
        memory_mb = self._services[service].memory_mb
        if memory_mb > self._memory_mb[node]:
            raise BrokenGrant(f"{service} needs {memory_mb} MB of cells that have {self._memory_mb[node]}")
        return memory_mb if memory_mb and self._memory_mb[node] < UNLIMITED else self._memory_mb[node]

    def _compute(self, action_id: str, node: str, named: Named) -> None:
        for other_node, other in self._runs.values():
            if other_node == node and other != named and set(other[1]) & set(named[1]):
                raise BrokenGrant(f"{named[0]} computes on cells {named[1]} of {node} while {other[0]} does on {other[1]}")
        self._runs[action_id] = (node, named)
        if self.running(node, named) > self._services[named[0]].max_concurrency:
            raise BrokenGrant(f"{named[0]} runs more at once on cells {named[1]} of {node} than it can")


def _listed(named: Iterable[Named]) -> str:
    return ", ".join(f"{service} on {cell_ids}" for service, cell_ids in named)
