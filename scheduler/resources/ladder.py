"""Who could use how many more units, and who would miss them least: the elastic actions of one group, kept in order.

Each elastic action stands on a ladder. A *rung* leads from one of its amounts to a larger one; what it is worth is the
time that it saves over the core-time that it costs more, since wide grants are less efficient:

    (d(a) - d(b)) / (c(b) - c(a)),   d(m) = 1 / speed on m,   c(m) = m ** WIDTH * d(m)

That is the price of a core's second at which both amounts come to the same. If each action takes all rungs that are worth
more than one price, the same for all, the sum of durations and of core-time at that price is least; the ladder finds the
price at which the units are just used up. Three others were turned down. The sum of remaining seconds, which the paper's
programme minimises, favours long actions, since they have most seconds to save, while units given to the action that is
soonest done come back soonest. The sum of speeds asks what units do now and not what they cost until the end. The product
of all speeds (proportional fairness; F. Kelly 1997) gives an action that scales badly nearly as much as one that scales
well. And durations need not be known: they cancel out, and a rung's worth does not change with time.

So the order is kept, not computed: a decision costs what it changes, O(log n) a rung, however many actions run, and one
look at the first of each job. Entries of the heaps are not removed when an action moves on; each bears the turn it was made in.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from scheduler.durations import speed_on
from scheduler.model import Running, Waiting
from tangram.elasticity import FLAT, Curve

WIDTH: Final = 1.05
"""How the charge for a grant grows with its width. With 1 an action that scales perfectly would cost nothing more however
wide it ran, and the first of several such would have all that is free; with more of it the split is the more even one."""

FREE: Final = 1000.0
"""What a rung is worth that costs no core-time at all, as where a recorded curve scales better than perfectly; no other is
worth more. It is far above what any curve of Amdahl's comes to."""

LEAST_SAVED: Final = 1e-12
"""Part of its time on the smallest amount that more units must save: below that it is rounding."""

LEAST_STEP: Final = 0.1
"""Part of the time that a stop on the way to a better amount must save. One that saves little would be refused to what runs
as not worth a resize, and would so keep it from all that comes after."""


class Rung(NamedTuple):
    """A step to a larger amount: its worth (time saved over core-time charged), the units it costs, and the amount reached."""

    worth: float
    price: int
    units: int


@lru_cache(maxsize=4096)
def rungs_of(units: tuple[int, ...], curve: Curve) -> tuple[Rung, ...]:
    """Return the rungs of some amounts on a curve, none worth more than the one before; none where more units do nothing.

    Their corners are the lower convex hull of durations over charges, the amounts that some price makes the best. Amounts
    on the way from one corner to the next are rungs too, and worth as much: where there is no room for the whole way, part
    of it is climbed.
    """
    if len(units) < 2 or curve is FLAT:
        return ()
    amounts, durations = _ever_faster(units, curve)
    charges = [amount**WIDTH * duration for amount, duration in zip(amounts, durations, strict=True)]
    last = len(amounts) - 1
    # As far as the charge falls with the duration, no price makes the smaller amount the better: that way is free.
    at, corner, worth = 0, min(range(last + 1), key=lambda index: (charges[index], -index)), FREE
    rungs = list[Rung]()
    while True:
        for stop in range(at + 1, corner + 1):
            if stop == corner or durations[at] - durations[stop] >= LEAST_STEP * durations[at]:
                rungs.append(Rung(worth, amounts[stop] - amounts[at], amounts[stop]))
                at = stop
        if at == last:
            return tuple(rungs)
        later = range(at + 1, last + 1)
        steepest, corner = max(((durations[at] - durations[index]) / (charges[index] - charges[at]), index) for index in later)
        worth = min(worth, steepest)  # rounding must not put a later rung before an earlier one


def _ever_faster(units: tuple[int, ...], curve: Curve) -> tuple[list[int], list[float]]:
    """Return the amounts that are faster than all smaller ones, and their durations."""
    amounts, durations = [units[0]], [1.0 / speed_on(curve, units[0])]
    for amount in units[1:]:
        duration = 1.0 / speed_on(curve, amount)
        if durations[-1] - duration > LEAST_SAVED * durations[0]:
            amounts.append(amount)
            durations.append(duration)
    return amounts, durations


def rungs_within(waiting: Waiting, units: int) -> tuple[Rung, ...]:
    """Return an action's rungs where it can have at most `units`: what it cannot reach is no corner of its ladder."""
    amounts = waiting.units
    if amounts[-1] > units:
        amounts = tuple(amount for amount in amounts if amount <= units)
    return rungs_of(amounts, waiting.estimate.curve)


@dataclass(slots=True, eq=False)
class Climber:
    """An elastic action on its ladder; `at` rungs are below it. It may not have started yet."""

    waiting: Waiting
    rungs: tuple[Rung, ...]
    running: Running | None = None
    at: int = 0
    turn: int = 0
    gone: bool = False

    @property
    def units(self) -> int:
        """Its amount on this rung."""
        return self.rungs[self.at - 1].units if self.at else self.waiting.least

    @property
    def speed(self) -> float:
        """Its speed-up on this rung."""
        return speed_on(self.waiting.estimate.curve, self.units)


Entry = tuple[float, int, int, Climber]
"""What the heaps hold: worth, order, the turn it was made in, and who."""

Heaps = dict[str, list[Entry]]
"""One heap for each job that has entries."""


@dataclass(slots=True, eq=False)
class Ladder:
    """The climbers of one group; `extra` are the units that they hold above their smallest amounts."""

    extra: int = 0
    extra_by_job: dict[str, int] = field(default_factory=dict)
    _ups: Heaps = field(default_factory=dict)
    _downs: Heaps = field(default_factory=dict)
    _resting: list[Entry] = field(default_factory=list)
    _turns: int = 0

    def enter(self, climber: Climber) -> None:
        """Take in an action, on the rung where it is."""
        self._count(climber, climber.units - climber.waiting.least)
        self._offer(climber)

    def leave(self, climber: Climber) -> None:
        """Forget an action that has ended or is being stopped."""
        if not climber.gone:
            climber.gone = True
            self._count(climber, climber.waiting.least - climber.units)

    def climb(self, climber: Climber) -> None:
        """Put an action one rung up."""
        rung = climber.rungs[climber.at]
        self._count(climber, rung.price)
        climber.at += 1
        self._offer(climber)

    def descend(self, climber: Climber) -> int:
        """Put an action one rung down; return the units that this frees."""
        climber.at -= 1
        freed = climber.rungs[climber.at].price
        self._count(climber, -freed)
        self._offer(climber)
        return freed

    def best_up(self, but: Collection[str] = ()) -> Climber | None:
        """Return who is worth the next unit most, of all jobs but some."""
        return self._best(self._ups, but)

    def first_down(self, job: str) -> Climber | None:
        """Return who of a job misses its last units least."""
        entry = self._first(self._downs, job) if job in self._downs else None
        return None if entry is None else entry[3]

    def best_down(self, but: Collection[str] = ()) -> Climber | None:
        """Return who misses its last units least, of all jobs but some."""
        return self._best(self._downs, but)

    def rest(self, climber: Climber, until: float) -> None:
        """Look at an action as one to grow no more before `until`; it must be the best up of its job."""
        heapq.heappop(self._ups[climber.waiting.action.job])
        heapq.heappush(self._resting, (until, climber.waiting.seq, climber.turn, climber))

    def set_aside(self, climber: Climber) -> Entry:
        """Take the best up of its job out for a moment; `put_back` what this returns."""
        return heapq.heappop(self._ups[climber.waiting.action.job])

    def put_back(self, entry: Entry) -> None:
        """Put back what was set aside."""
        _push(self._ups, entry)

    def wake(self, now: float) -> None:
        """Look again at those that have rested until `now`."""
        while self._resting and self._resting[0][0] <= now:
            _, seq, turn, climber = heapq.heappop(self._resting)
            if not climber.gone and turn == climber.turn:
                _push(self._ups, (-climber.rungs[climber.at].worth, seq, turn, climber))

    def _count(self, climber: Climber, units: int) -> None:
        self.extra += units
        _add(self.extra_by_job, climber.waiting.action.job, units)

    def _offer(self, climber: Climber) -> None:
        self._turns += 1
        climber.turn = self._turns
        if climber.at < len(climber.rungs):
            _push(self._ups, (-climber.rungs[climber.at].worth, climber.waiting.seq, climber.turn, climber))
        if climber.at:
            _push(self._downs, (climber.rungs[climber.at - 1].worth, -climber.waiting.seq, climber.turn, climber))

    def _best(self, heaps: Heaps, but: Collection[str]) -> Climber | None:
        if len(heaps) == 1:  # as mostly: spare the rest
            (job,) = heaps
            entry = None if job in but else self._first(heaps, job)
            return None if entry is None else entry[3]
        first: Entry | None = None
        for job in tuple(heaps):
            entry = None if job in but else self._first(heaps, job)
            if entry is not None and (first is None or entry < first):
                first = entry
        return None if first is None else first[3]

    def _first(self, heaps: Heaps, job: str) -> Entry | None:
        heap = heaps[job]
        while heap:
            _, _, turn, climber = heap[0]
            if not climber.gone and turn == climber.turn:
                if climber.running is None or not climber.running.stopping:
                    return heap[0]
                self.leave(climber)
            heapq.heappop(heap)
        del heaps[job]
        return None


def _push(heaps: Heaps, entry: Entry) -> None:
    heapq.heappush(heaps.setdefault(entry[3].waiting.action.job, []), entry)


def _add(amounts: dict[str, int], job: str, units: int) -> None:
    held = amounts.get(job, 0) + units
    if held:
        amounts[job] = held
    else:
        amounts.pop(job, None)
