"""Workers' reports of their instances, compared with the core's books.

The core decides on instances and its nodes carry the decisions out. So most reports agree with the core's books. Where a report
differs, the node is right:

| it says | the core has | then |
|---|---|---|
| `resident` | the instance, being restored | it takes actions |
| `resident` | nothing that would be in its way | it is adopted |
| `starting`, `restoring` | nothing that would be in its way | it is adopted, and takes no actions yet |
| `absent`, `host`, `failed` | the instance, idle | it is forgotten |
| `failed` | the instance, being restored | it is forgotten; a queue that waits for it has another one brought |

Everything else changes nothing. A report may be late. An instance with actions is not forgotten, since its actions report their own
ends. A report that an instance is gone may be older than its present restore.

A node that has joined first reports its existing instances. If an earlier scheduler knew the node, its first beat reports them, and
no cell of the node is granted before. Next, its *warm* services are brought onto free cells, in their declared order, on the least
amount each. *Warm* services should be resident before an action asks for them. A warm service that finds no room waits for its
first action, like any other. The node's warm services are brought again when it declares its services anew, and when it ceases to
drain or to be silent. Nothing is brought onto a draining or silent node. A service is forgotten once no node declares it any more.
Declarations of nodes that are away count, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.model import NodeSpec, ServiceSpec
from scheduler.model.commands import Command, Restore
from scheduler.model.events import ServiceChanged, ServicesDeclared
from scheduler.model.state import State


class Residency:
    """Takes reports of instances, and brings warm services."""

    def __init__(self, state: State, groups: Mapping[str, CellGroup], out: list[Command]) -> None:
        self._state = state
        self._groups = groups
        self._out = out
        self._to_warm: dict[str, float] = {}
        self._declared: dict[str, frozenset[str] | None] = {}

    def joined(self, name: str, now: float) -> None:
        """Have the warm services of a node brought at the next `Tick`. By then the node has reported its instances."""
        if any(spec.warm for spec in self._state.services.values()) and not self._state.rules.owned_cells:
            self._to_warm[name] = now

    def resumed(self, spec: NodeSpec) -> None:
        """Bring and start nothing on the cells of a node until its reports and then `declared` have come."""
        node = self._state.nodes.get(spec.name)
        if node is not None:
            node.heard = spec.services is None

    def gone(self, node: str, services: frozenset[str] | None) -> list[str]:
        """Note the services that a node declares; return the dropped services that no node declares any more.

        A node that is away may come back. Its declarations count until then.
        """
        before, self._declared[node] = self._declared.get(node), services
        if before is None or services is None:
            return []
        others = [declared for other, declared in self._declared.items() if other != node]
        gone = [name for name in sorted(before - services) if not any(declared is None or name in declared for declared in others)]
        for name in gone:
            self._state.services.pop(name, None)
        return gone

    def is_away(self, service: str) -> bool:
        """Return whether a node that is away declares a service."""
        away = (declared for node, declared in self._declared.items() if node not in self._state.nodes)
        return any(declared is None or service in declared for declared in away)

    def declared(self, event: ServicesDeclared, now: float) -> list[str]:
        """Have a node run its declared services from now on; return the services that no node declares any more. It may be away."""
        gone = self.gone(event.node, event.services)
        node = self._state.nodes.get(event.node)
        if node is None:
            return gone
        node.spec, node.heard = replace(node.spec, services=event.services), True
        self._as_declared(self._groups[event.node])
        self._groups[event.node].touch()
        self.joined(event.node, now)
        return gone

    def _as_declared(self, group: CellGroup) -> None:
        """Give the instances of a node their newly declared properties. The worker restarts them under their actions."""
        if self._state.rules.owned_cells:
            return
        for instance in group.instances:
            spec = self._state.services.get(instance.service)
            if spec is not None:
                instance.places, instance.pinned = spec.max_concurrency, spec.pinned
                instance.memory_mb = group.need_mb(spec)

    def next_warm(self) -> float | None:
        """Return when warm services are to be brought; None if there are none."""
        return min(self._to_warm.values(), default=None)

    def warm_up(self, now: float) -> None:
        """Bring the warm services of the nodes that have joined."""
        names, self._to_warm = list(self._to_warm), {}
        for group in [self._groups[name] for name in names if name in self._groups]:
            for spec in self._state.services.values():
                wanted = spec.warm and group.node.takes("gpu", ()) and group.node.serves(spec.name)
                if wanted and all(one.service != spec.name for one in group.instances):
                    self._bring(group, spec, now)

    def _bring(self, group: CellGroup, spec: ServiceSpec, now: float) -> None:
        """Bring a service onto cells with room, if there are any."""
        if spec.memory_mb > group.cell_memory_mb:
            return
        plan = group.plan(spec, spec.cells[0], ())
        if plan is None:
            return
        instance = group.bring(spec, plan)
        instance.restoring = True
        instance.last_used = instance.since = now
        self._out.append(Restore(node=group.node.spec.name, service=spec.name, cell_ids=instance.cell_ids))

    def changed(self, event: ServiceChanged, now: float) -> None:
        """Note the state of an instance. Reports of a node that is not up, or of an unknown service, are dropped."""
        group = self._groups.get(event.node)
        if group is None:
            return
        cell_ids = tuple(sorted(event.cell_ids))
        instance = group.instance_on(event.service, cell_ids)
        if instance is not None:
            changed = self._known(event, group, instance)
        else:
            changed = event.state in ("resident", "starting", "restoring") and self._adopt(event, group, cell_ids, now)
        if changed:
            group.touch()

    @staticmethod
    def _known(event: ServiceChanged, group: CellGroup, instance: Instance) -> bool:
        if event.state == "resident":
            was, instance.restoring = instance.restoring, False
            return was
        gone = ("failed",) if instance.restoring else ("absent", "host", "failed")
        if event.state not in gone or instance.active:
            return False
        group.drop(instance)
        return True

    def _adopt(self, event: ServiceChanged, group: CellGroup, cell_ids: tuple[int, ...], now: float) -> bool:
        spec = self._state.services.get(event.service)
        if spec is None or not cell_ids or self._state.rules.owned_cells or not group.has_room_on(spec, cell_ids):
            return False
        instance = group.adopt(spec, cell_ids)
        instance.restoring = event.state != "resident"
        instance.last_used = instance.since = now
        return True
