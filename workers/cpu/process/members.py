"""The processes of a session, as they are found from the host."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from workers.cpu.process import tree


@dataclass(frozen=True, slots=True)
class Members:
    """Everything below the keeper, but for the holder that sets a session apart: bwrap, its init and a pause, or none.

    Orphans become children of the init where there is one, else of the keeper.
    """

    keeper: int = 0
    shell: int = 0
    holder: tuple[int, ...] = ()

    @property
    def roots(self) -> tuple[int, ...]:
        """Return the processes that every other one is below, none of which is a command's."""
        return (self.keeper, self.holder[1]) if self.holder else (self.keeper,)

    def living(self, spared: Collection[tree.Identity] = ()) -> list[tree.Process]:
        """Return the shell and what commands have started, without `spared` ones and what is below those."""
        return tree.descendants(self.roots, spared, self.holder)

    def unburied(self, spared: Collection[tree.Identity]) -> list[tree.Process]:
        """Return the same with zombies."""
        return tree.unburied(self.roots, spared, self.holder)

    def settled(self) -> tuple[list[tree.Process], bool]:
        """Return all processes, also where one dies at this moment and its children are handed on; and whether that surely is all."""
        return tree.settled(self.roots, (), self.holder)

    def nearest(self) -> list[int]:
        """Return the ids of the processes right below the roots, where a process comes whose parent has ended."""
        return [child for root in self.roots for child in tree.children(root, 1) if child not in self.holder]
