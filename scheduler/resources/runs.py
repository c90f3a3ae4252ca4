"""The free places of one row of places, and where stretches of it are taken.

A *run* is a longest stretch of free places next to each other. Places are bits of one number, `1 << n` for the place `n`,
and what is asked of it is asked of all runs at once: `free & free >> 1` has a bit for each two free places in a row, and
so on by doubling. So taking costs a few operations on that number whatever the number of runs, and giving back costs one.
"""

from __future__ import annotations

from collections.abc import Iterator

Span = tuple[int, int]
"""Places from the first number up to, and without, the second."""


class FreeRuns:
    """The free places of a row of `size` places, all of them at first."""

    __slots__ = ("_places", "free")

    def __init__(self, size: int) -> None:
        self._places = (1 << size) - 1
        self.free = size
        """How many places are free."""

    def __iter__(self) -> Iterator[Span]:
        """Return the runs from the first to the last."""
        start = 0
        while rest := self._places >> start:
            start += _lowest(rest)
            end = self._end_of(start)
            yield start, end
            start = end

    def take(self, count: int) -> list[Span]:
        """Take `count` places, of which there must be as many: of the shortest run that is long enough, from its start.

        Where none is, the longest run goes first, so that the places lie in as few stretches as possible.
        """
        taken = list[Span]()
        while count:
            starts = stretches(self._places, count)
            if starts:
                start = _shortest(starts, count)
                taken.append(self._cut(start, start + count))
                break
            starts, length = _longest(self._places)
            while starts and count >= length:
                start = _lowest(starts)
                starts &= starts - 1
                taken.append(self._cut(start, start + length))
                count -= length
        return taken

    def take_near(self, count: int, held: int) -> list[Span]:
        """Take `count` places, of which there must be as many: those next to the `held` places, bits, first.

        Of the runs that touch them it is the shortest that is long enough, from the side that touches; else the
        longest first.
        """
        touching = [(start, self._end_of(start), True) for start in members(self._places & held << 1)]
        touching += [(self._start_of(last), last + 1, False) for last in members(self._places & held >> 1)]
        taken = list[Span]()
        while count and touching:
            start, end, from_start = min(touching, key=lambda run: (*fit(run[1] - run[0], count), run[0]))
            part = min(count, end - start)
            taken.append(self._cut(start, start + part) if from_start else self._cut(end - part, end))
            count -= part
            # Between two held places a run touches both, and is to be taken once.
            touching = [run for run in touching if run[0] != start]
        return taken + self.take(count) if count else taken

    def claim(self, place: int) -> bool:
        """Take this very place, a bit; False where it is not free."""
        if not self._places & place:
            return False
        self._places ^= place
        self.free -= 1
        return True

    def give_back(self, places: int) -> None:
        """Return places, bits, that are taken."""
        self._places |= places
        self.free += places.bit_count()

    def _cut(self, start: int, end: int) -> Span:
        """Take free places."""
        self._places ^= (1 << end) - (1 << start)
        self.free -= end - start
        return (start, end)

    def _end_of(self, start: int) -> int:
        """Return where the run ends that the place `start` is in."""
        return start + _lowest(~(self._places >> start))

    def _start_of(self, last: int) -> int:
        """Return where the run begins that the place `last` is in."""
        taken = ~self._places & (1 << last) - 1
        return taken.bit_length()


def fit(amount: int, count: int) -> tuple[bool, int]:
    """Return how well `amount` fits where `count` is wanted: the least that is enough comes first, else the most."""
    return (amount < count, amount if amount >= count else -amount)


def members(places: int) -> Iterator[int]:
    """Return the numbers of some places, ascending."""
    while places:
        yield _lowest(places)
        places &= places - 1


def stretches(places: int, count: int) -> int:
    """Return the places at which `count` of these in a row begin."""
    length = 1
    while length < count and places:
        step = min(length, count - length)
        places &= places >> step
        length += step
    return places


def narrowest(places: int, count: int) -> int:
    """Return the `count` of these places that lie closest together, the first such ones of several."""
    starts = stretches(places, count)
    if starts:
        return ((1 << count) - 1) << _lowest(starts)
    numbers = list(members(places))
    at = min(range(len(numbers) - count + 1), key=lambda at: numbers[at + count - 1] - numbers[at])
    return sum(1 << number for number in numbers[at : at + count])


def _shortest(starts: int, length: int) -> int:
    """Return the start of the shortest run, the first one of several, where stretches of that `length` begin at `starts`."""
    runs, step = starts & ~(starts << 1), 1
    while runs & runs - 1:
        longer = starts & starts >> step
        shorter = runs & ~longer
        if not shorter:
            starts, length = longer, length + step
            step = min(2 * step, length)
            continue
        runs = shorter
        if step == 1:
            break
        step //= 2
    return _lowest(runs)


def _longest(places: int) -> tuple[int, int]:
    """Return the starts of the longest runs, and how long these are."""
    length = step = 1
    while step:
        longer = places & places >> step
        if longer:
            places, length = longer, length + step
            step = min(2 * step, length)
        else:
            step //= 2
    return places, length


def _lowest(places: int) -> int:
    return (places & -places).bit_length() - 1
