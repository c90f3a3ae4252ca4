"""The free cores of a node or a pod, by *domain*: cores that share memory or a cache (docs/scheduling.md, "Where cores lie").

A domain is a row of cores in which neighbours have most in common, so cores are handed out in stretches of it
(`runs.py`). What goes out together comes from one domain where any has enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.resources.runs import FreeRuns, fit, members, narrowest

Domains = Sequence[Sequence[int]]


class FreeCores:
    """The free ones among the cores of some domains, all of them at first."""

    __slots__ = ("_at", "_domains", "_runs", "count")

    def __init__(self, domains: Domains) -> None:
        self._domains = tuple(tuple(domain) for domain in domains)
        self._runs = [FreeRuns(len(domain)) for domain in self._domains]
        self._at = {core: (number, 1 << place) for number, domain in enumerate(self._domains) for place, core in enumerate(domain)}
        self.count = len(self._at)
        """How many cores are free."""

    def ids(self) -> list[int]:
        """Return the free cores in ascending order."""
        domains = zip(self._domains, self._runs, strict=True)
        return sorted(core for domain, runs in domains for start, end in runs for core in domain[start:end])

    def only(self, core_ids: Iterable[int]) -> list[list[int]]:
        """Return the domains without what is not among these cores."""
        wanted = frozenset(core_ids)
        rows = ([core for core in domain if core in wanted] for domain in self._domains)
        return [row for row in rows if row]

    def take(self, count: int, near: Iterable[int] = ()) -> tuple[int, ...]:
        """Take `count` free cores, of which there must be as many.

        They come from the domain that would have fewest left of those that have enough, else from as few domains as
        possible. With `near`, the cores that are held already, they come from the domain of these as far as possible,
        the ones next to them first.
        """
        self.count -= count
        taken: tuple[int, ...] = ()
        if near:
            taken = self._take_near(count, near)
            count -= len(taken)
        while count:
            number = self._best_domain(count) if len(self._runs) > 1 else 0
            runs, domain = self._runs[number], self._domains[number]
            part = min(count, runs.free)
            for start, end in runs.take(part):
                taken += domain[start:end]
            count -= part
        return taken

    def claim(self, core_id: int) -> bool:
        """Take this very core; False where it is not free, or none of these."""
        number, place = self._at.get(core_id, (-1, 0))
        if number < 0 or not self._runs[number].claim(place):
            return False
        self.count -= 1
        return True

    def give_back(self, core_ids: Sequence[int]) -> None:
        """Return cores that were taken."""
        self.count += len(core_ids)
        for number, places in self._by_domain(core_ids).items():
            self._runs[number].give_back(places)

    def shrink(self, core_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Give back all but `count` of these cores; return those kept, which lie closest together: in as few domains as possible."""
        held, missing = self._by_domain(core_ids), count
        kept: tuple[int, ...] = ()
        self.count += len(core_ids) - count
        while missing:
            enough = [number for number, places in held.items() if places.bit_count() >= missing]
            if enough:
                windows = [(number, narrowest(held[number], missing)) for number in enough]
                number, stay = min(windows, key=lambda window: _width(window[1])) if len(windows) > 1 else windows[0]
            else:
                number = min(held, key=lambda number: (-held[number].bit_count(), number))
                stay = held[number]
            held[number] ^= stay
            missing -= stay.bit_count()
            kept += tuple(self._domains[number][place] for place in members(stay))
        for number, places in held.items():
            self._runs[number].give_back(places)
        return kept

    def _take_near(self, count: int, near: Iterable[int]) -> tuple[int, ...]:
        held = self._by_domain(near)
        homes = list(held)
        if len(homes) > 1:
            homes.sort(key=lambda number: (-held[number].bit_count(), number))
            homes = next(([number] for number in homes if self._runs[number].free >= count), homes)
        taken: tuple[int, ...] = ()
        for number in homes:
            part = min(count - len(taken), self._runs[number].free)
            for start, end in self._runs[number].take_near(part, held[number]):
                taken += self._domains[number][start:end]
        return taken

    def _by_domain(self, core_ids: Iterable[int]) -> dict[int, int]:
        """Return the places of cores, by domain."""
        held: dict[int, int] = {}
        at = self._at
        for core_id in core_ids:
            number, place = at[core_id]
            held[number] = held.get(number, 0) | place
        return held

    def _best_domain(self, count: int) -> int:
        """Return the domain that has enough and fewest left over, else the one that has most."""
        return min(range(len(self._runs)), key=lambda number: fit(self._runs[number].free, count))


def _width(places: int) -> int:
    return places.bit_length() - (places & -places).bit_length()
