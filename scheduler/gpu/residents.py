"""Who is resident on the cells of all nodes, by service.

A snapshot of which instances there are, made where a decision begins (`look_at`) and again after each change (`note`).
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.gpu.cells import CellGroup, Instance


class Residents:
    """The instances of all nodes by service. Those that are `leaving` count as gone."""

    def __init__(self) -> None:
        self._groups: list[CellGroup] = []
        self._by_service: dict[str, list[Instance]] = {}
        self._group_of: dict[Instance, CellGroup] = {}

    def look_at(self, groups: Iterable[CellGroup]) -> None:
        """Take the instances of these groups, and of no others."""
        self._groups = list(groups)
        self.note()

    def note(self) -> None:
        """Take the instances of the same groups anew, after there have come or gone some."""
        self._by_service = {}
        self._group_of = {}
        for group in self._groups:
            for instance in group.instances:
                if instance.leaving is None:
                    self._by_service.setdefault(instance.service, []).append(instance)
                    self._group_of[instance] = group

    def usable(self, service: str, units: tuple[int, ...]) -> list[Instance]:
        """Return the instances, busy or not, on which an action of the service with these amounts could run."""
        return [instance for instance in self._by_service.get(service, ()) if instance.size in units]

    def blocked(self, instance: Instance) -> bool:
        """Say whether an instance is idle, and another one computes on its cells."""
        return not instance.busy and self._group_of[instance].blocked(instance)

    def has_company(self, instance: Instance) -> bool:
        """Say whether there are instances of other services on its cells."""
        group = self._group_of[instance]
        return group.sharing and bool(group.others_on(instance.cell_ids, instance.service))

    def count(self, service: str) -> int:
        """Return the instances of a service."""
        return len(self._by_service.get(service, ()))
