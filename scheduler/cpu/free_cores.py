"""The free cores of a node or a pod, and which of them a grant gets.

A *domain* is a row of cores in which neighbours have most in common (docs/scheduling.md, "Where cores lie"). The rules:

1. Cores that are granted together come from one domain if any has enough: the domain with fewest left over. Otherwise they come
   from as few domains as possible.
2. Within a domain they are the shortest stretch of free neighbours that is long enough. Otherwise they are as few stretches as possible.
3. An action that grows first gets the cores next to its own, then other cores of its domains.
4. An action that shrinks keeps the cores that lie closest together.

The free cores of a domain are a string of bytes, 1 for a free core. A regular expression finds the stretches.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

Domains = Sequence[Sequence[int]]

_STRETCH: Final = re.compile(rb"\x01+")


class FreeCores:
    """The free ones among the cores of some domains, all of them at first."""

    __slots__ = ("_at", "_domains", "_free", "_left", "count")

    def __init__(self, domains: Domains) -> None:
        self._domains = tuple(tuple(domain) for domain in domains)
        self._free = [bytearray(b"\x01" * len(domain)) for domain in self._domains]
        self._left = [len(domain) for domain in self._domains]
        self._at = {core: (number, place) for number, domain in enumerate(self._domains) for place, core in enumerate(domain)}
        self.count = len(self._at)
        """How many cores are free."""

    def ids(self) -> list[int]:
        """Return the free cores in ascending order."""
        return sorted(core for core, (number, place) in self._at.items() if self._free[number][place])

    def only(self, core_ids: Iterable[int]) -> list[list[int]]:
        """Return the domains, reduced to these cores."""
        wanted = frozenset(core_ids)
        rows = ([core for core in domain if core in wanted] for domain in self._domains)
        return [row for row in rows if row]

    def take(self, count: int, near: Collection[int] = ()) -> tuple[int, ...]:
        """Take `count` free cores, close to the cores in `near`, which the action already holds. Enough cores must be free."""
        held = self._by_domain(near) if near else {}
        taken = list[int]()
        while len(taken) < count:
            missing = count - len(taken)
            homes = [number for number in held if self._left[number]]
            if homes:
                number = min(homes, key=lambda number: (self._left[number] < missing, -len(held[number]), number))
            elif len(self._left) == 1:
                number = 0
            else:
                number = min(range(len(self._left)), key=lambda number: _fit(self._left[number], missing))
            taken += self._take_in(number, min(missing, self._left[number]), held.get(number, ()))
        return tuple(taken)

    def claim(self, core_id: int) -> bool:
        """Take this core; return False if it is not free, or unknown."""
        number, place = self._at.get(core_id, (-1, 0))
        if number < 0 or not self._free[number][place]:
            return False
        self._free[number][place] = 0
        self._count(number, -1)
        return True

    def give_back(self, core_ids: Iterable[int]) -> None:
        """Return cores that were taken."""
        for core_id in core_ids:
            number, place = self._at[core_id]
            self._free[number][place] = 1
            self._count(number, 1)

    def shrink(self, core_ids: Iterable[int], count: int) -> tuple[int, ...]:
        """Give back all but `count` of these cores; return the kept cores.

        These lie closest together, in as few domains as possible.
        """
        held = self._by_domain(core_ids)
        kept = list[int]()
        while len(kept) < count:
            missing = count - len(kept)
            windows = [
                (places[first + missing - 1] - places[first], number, first)
                for number, places in held.items()
                for first in range(len(places) - missing + 1)
            ]
            if windows:
                _, number, first = min(windows)
            else:
                number, first = max(held, key=lambda number: (len(held[number]), -number)), 0
            places = held[number]
            kept += [self._domains[number][place] for place in places[first : first + missing]]
            held[number] = places[:first] + places[first + missing :]
        self.give_back(self._domains[number][place] for number, places in held.items() for place in places)
        return tuple(kept)

    def _take_in(self, number: int, count: int, held: Collection[int]) -> list[int]:
        """Take free cores of one domain, those next to the `held` places first."""
        free, taken = self._free[number], list[int]()
        while len(taken) < count:
            missing = count - len(taken)
            stretches = [found.span() for found in _STRETCH.finditer(free)]
            touching = [(start, end) for start, end in stretches if start - 1 in held or end in held] if held else []
            # As `_fit` orders them, but without a call for each.
            spans = touching or stretches
            _, _, start, end = min([(end - start < missing, abs(end - start - missing), start, end) for start, end in spans])
            part = min(missing, end - start)
            if touching and start - 1 not in held:
                start = end - part
            free[start : start + part] = bytes(part)
            taken += self._domains[number][start : start + part]
        self._count(number, -count)
        return taken

    def _by_domain(self, core_ids: Iterable[int]) -> dict[int, list[int]]:
        held: dict[int, list[int]] = {}
        for core_id in core_ids:
            number, place = self._at[core_id]
            held.setdefault(number, []).append(place)
        for places in held.values():
            places.sort()
        return held

    def _count(self, number: int, cores: int) -> None:
        self._left[number] += cores
        self.count += cores


def _fit(amount: int, count: int) -> tuple[bool, int]:
    """Order amounts where `count` is wanted: the least sufficient amount comes first, else the largest."""
    return (amount < count, abs(amount - count))
