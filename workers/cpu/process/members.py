"""The processes of a session, as they are found from the host."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from workers.cpu.process import tree


@dataclass(frozen=True, slots=True)
class Members:
    """Everything below the supervisor, but for the anchor that sets a session apart: bwrap, its init and a pause, or none.

    Orphans become children of the init where there is one, else of the supervisor.
    """

    supervisor: int = 0
    shell: int = 0
    anchor: tuple[int, ...] = ()

    @property
    def roots(self) -> tuple[int, ...]:
        """Return the processes that every other one is below, none of which is a command's."""
        return (self.supervisor, self.anchor[1]) if self.anchor else (self.supervisor,)

    def living(self, spared: Collection[tree.Identity] = ()) -> list[tree.Process]:
        """Return the shell and what commands have started, without `spared` ones and what is below those."""
        return tree.descendants(self.roots, spared, self.anchor)

    def with_zombies(self, spared: Collection[tree.Identity]) -> list[tree.Process]:
        """Return the same with zombies."""
        return tree.with_zombies(self.roots, spared, self.anchor)

    def settled(self) -> tuple[list[tree.Process], bool]:
        """Return all processes, also where one dies at this moment and its children are handed on; and whether that surely is all."""
        return tree.settled(self.roots, (), self.anchor)

    def nearest(self) -> list[int]:
        """Return the ids of the processes right below the roots, where a process comes whose parent has ended."""
        return [child for root in self.roots for child in tree.children(root, 1) if child not in self.anchor]
