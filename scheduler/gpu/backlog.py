"""How much there is to do for each cell that a line could use: what sizing.py goes by.

What runs counts where it runs. What is yet to start, or to come, is spread over all cells where it could: evenly, though in the end it
may go anywhere. Nodes that could run the same are one kind, so that this costs as much for a hundred of them as for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.state import Node

Able = Callable[[Node], bool]
"""Says whether a node, were it all free, could run what is spoken of."""


@dataclass(slots=True)
class _Kind:
    like: Node
    cells: int = 0
    actions: float = 0.0


class OnHand:
    """The actions that run on the cells of nodes, and those that are added to them."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        kinds: dict[object, _Kind] = {}
        for node in nodes:
            spec, group = node.spec, node.cells
            alike = (node.heard, group.capacity, spec.services, spec.labels, spec.pools, spec.memory_mb, spec.cell_memory_mb)
            kind = kinds.get(alike)
            if kind is None:
                kind = kinds[alike] = _Kind(node)
            kind.cells += group.capacity
            kind.actions += len(group.running)
        self._kinds = [kind for kind in kinds.values() if kind.cells]

    def add(self, actions: float, able: Able) -> None:
        """Spread actions over the nodes that could run them."""
        for kind, cells in self._shares(able):
            kind.actions += actions * kind.cells / cells

    def per_cell(self, able: Able) -> float:
        """Return the actions for each cell of the nodes that could run what is asked about."""
        return sum(kind.actions / cells for kind, cells in self._shares(able))

    def _shares(self, able: Able) -> list[tuple[_Kind, int]]:
        """Return the kinds of nodes that are able, each with the number of cells of all of these kinds."""
        kinds = [kind for kind in self._kinds if able(kind.like)]
        cells = sum(kind.cells for kind in kinds)
        return [(kind, cells) for kind in kinds]
