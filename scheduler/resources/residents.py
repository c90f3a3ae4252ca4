"""Who is resident on the cells of all nodes, against what the plan wants: how much of a service there is, and what is too much.

A snapshot of the instances, made where a decision begins and again after each change; the plan's targets stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scheduler.placement import Target
from scheduler.resources.gpu import CellGroup, Instance

NOTHING = Target()


class Residents:
    """The instances of all nodes by service. Those that are `leaving` count as gone."""

    def __init__(self, groups: Iterable[CellGroup], targets: Mapping[str, Target]) -> None:
        self._groups = list(groups)
        self._targets = targets
        self._by_service: dict[str, list[Instance]] = {}
        self.note()

    def note(self) -> None:
        """Look at the instances anew, after they have changed."""
        self._by_service = {}
        for group in self._groups:
            for instance in group.instances:
                if instance.leaving is None:
                    self._by_service.setdefault(instance.service, []).append(instance)

    def target(self, service: str) -> Target:
        """Return what the plan wants of a service: nothing where it does not know it."""
        return self._targets.get(service, NOTHING)

    def usable(self, service: str, units: tuple[int, ...]) -> list[Instance]:
        """Return the instances, busy or not, on which an action of the service with these amounts could run."""
        return [instance for instance in self._by_service.get(service, ()) if instance.size in units]

    def cells(self, service: str) -> int:
        """Return the cells that the service holds."""
        return sum(instance.size for instance in self._by_service.get(service, ()))

    def count(self, service: str) -> int:
        """Return its instances."""
        return len(self._by_service.get(service, ()))

    def below(self, service: str) -> bool:
        """Say whether the service holds fewer cells than the plan wants for it."""
        return self.cells(service) < self.target(service).cells

    def excess(self, instance: Instance, besides: Sequence[Instance] = ()) -> bool:
        """Say whether the plan can do without an instance, `besides` being gone already.

        It can where the service keeps its cells, or has too many of them and this instance is of a wrong size.
        """
        target, held = self.target(instance.service), self.cells(instance.service)
        held -= sum(gone.size for gone in besides if gone.service == instance.service)
        return held - instance.size >= target.cells or (instance.size != target.size and held > target.cells)
