"""The elastic actions of one group of cores, ordered by their gain from more units and by their loss from fewer.

A *step* leads from one of an action's amounts to a larger one. Its *marginal gain* is the saved time over the extra core-time,
since wide grants are less efficient:

    (d(a) - d(b)) / (c(b) - c(a)),   d(m) = 1 / speed on m,   c(m) = m ** width_charge * d(m)

The gain is the price of a core's second at which both amounts cost the same. Suppose that all actions take the steps that gain more
than one common price. Then the sum of durations and of core-time at this price is least. The queue finds the price at which the
units are just used up. Durations cancel out, so a step's gain does not change with time. Three other orders were turned down:

* The sum of remaining seconds, which the paper minimises, favours long actions. But units that are given to the action that is
  soonest done come back soonest.
* The sum of speeds counts the use of units now, and not their cost until the end.
* The product of all speeds (proportional fairness; F. Kelly 1997) gives a badly scaling action nearly as much as a well scaling
  one.

So the order is kept, not computed. A decision costs O(log n) for each step, and one comparison for each job.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

from scheduler.cpu.heap import GONE, Heap
from scheduler.cpu.tuning import TUNING
from scheduler.learning.durations import speed_on
from scheduler.model import ROUNDING, Running, Waiting
from tangram.elasticity import FLAT, Curve

FREE_GAIN: Final = 1000.0
"""The gain of a step that costs no core-time, as on a recorded curve that scales better than perfectly. No other step gains more;
Amdahl's curves stay far below."""

LEAST_STOP: Final = 0.1
"""Part of the time that a stop on the way to a better amount must save. A running action would be refused a stop that saves little,
and then never reach the later steps."""


class Step(NamedTuple):
    """A step to a larger amount: its marginal gain, its extra units, and the amount that it reaches."""

    gain: float
    extra_units: int
    units: int


@lru_cache(maxsize=4096)
def steps_of(units: tuple[int, ...], curve: Curve) -> tuple[Step, ...]:
    """Return the steps of some amounts on a curve, in descending order of gain. There are none where more units do nothing.

    The corners are the lower convex hull of durations over charges: each is the best amount at some price. Amounts between two
    corners are steps too, with the same gain. If the whole way has no room, part of it is taken.
    """
    if len(units) < 2 or curve is FLAT:
        return ()
    amounts, durations = _ever_faster(units, curve)
    charges = [amount**TUNING.width_charge * duration for amount, duration in zip(amounts, durations, strict=True)]
    last = len(amounts) - 1
    # While the charge falls with the duration, the smaller amount is better at no price: these steps are free.
    at, corner, gain = 0, min(range(last + 1), key=lambda index: (charges[index], -index)), FREE_GAIN
    steps = list[Step]()
    while True:
        for stop in range(at + 1, corner + 1):
            if stop == corner or durations[at] - durations[stop] >= LEAST_STOP * durations[at]:
                steps.append(Step(gain, amounts[stop] - amounts[at], amounts[stop]))
                at = stop
        if at == last:
            return tuple(steps)
        later = range(at + 1, last + 1)
        steepest, corner = max(((durations[at] - durations[index]) / (charges[index] - charges[at]), index) for index in later)
        gain = min(gain, steepest)  # rounding must not put a later step before an earlier one


def _ever_faster(units: tuple[int, ...], curve: Curve) -> tuple[list[int], list[float]]:
    """Return the amounts that are faster than all smaller ones, and their durations."""
    amounts, durations = [units[0]], [1.0 / speed_on(curve, units[0])]
    for amount in units[1:]:
        duration = 1.0 / speed_on(curve, amount)
        if durations[-1] - duration > ROUNDING * durations[0]:
            amounts.append(amount)
            durations.append(duration)
    return amounts, durations


@dataclass(slots=True, eq=False)
class Candidate:
    """An elastic action that has taken the first `taken` of its steps. It may not have started yet."""

    waiting: Waiting
    steps: tuple[Step, ...]
    running: Running | None = None
    taken: int = 0
    version: int = 0

    @classmethod
    def of(cls, waiting: Waiting, most_units: int) -> Candidate:
        """Return an action on its smallest amount that can have at most `most_units`."""
        amounts = waiting.units
        if amounts[-1] > most_units:
            amounts = tuple(amount for amount in amounts if amount <= most_units)
        return cls(waiting, steps_of(amounts, waiting.estimate.curve))

    @property
    def units(self) -> int:
        """Its present amount."""
        return self.steps[self.taken - 1].units if self.taken else self.waiting.least

    @property
    def speed(self) -> float:
        """Its speed-up on its present amount."""
        return speed_on(self.waiting.estimate.curve, self.units)

    @property
    def next_step(self) -> Step:
        """The step that it would take next; it must have one."""
        return self.steps[self.taken]

    @property
    def last_step(self) -> Step:
        """The step that it took last; it must have taken one."""
        return self.steps[self.taken - 1]


Heaps = defaultdict[str, Heap[Candidate]]
"""A heap for each job."""


@dataclass(slots=True, eq=False)
class MarginalQueue:
    """The elastic actions of one group. `extra` counts their units above their smallest amounts."""

    extra: int = 0
    extra_by_job: dict[str, int] = field(default_factory=dict)
    _next: Heaps = field(default_factory=lambda: defaultdict(Heap))
    """For each job, the actions that can take a step, the highest gain first."""
    _last: Heaps = field(default_factory=lambda: defaultdict(Heap))
    """For each job, the actions that have taken a step, the lowest gain first."""
    _resting: Heap[Candidate] = field(default_factory=Heap)
    _versions: int = 0

    def enter(self, candidate: Candidate) -> None:
        """Take in an action, on the amount that it has."""
        self._count(candidate, candidate.units - candidate.waiting.least)
        self._offer(candidate)

    def leave(self, candidate: Candidate) -> None:
        """Forget an action that has ended or is being stopped."""
        if candidate.version != GONE:
            candidate.version = GONE
            self._count(candidate, candidate.waiting.least - candidate.units)

    def grow(self, candidate: Candidate) -> None:
        """Have an action take its next step."""
        self._count(candidate, candidate.next_step.extra_units)
        candidate.taken += 1
        self._offer(candidate)

    def shrink(self, candidate: Candidate) -> None:
        """Have an action take its last step back."""
        self._count(candidate, -candidate.last_step.extra_units)
        candidate.taken -= 1
        self._offer(candidate)

    def best_to_grow(self, but: Collection[str] = ()) -> Candidate | None:
        """Return the action that gains most from its next step. Jobs in `but` are left out."""
        return self._best(self._next, but)

    def best_to_shrink(self, but: Collection[str] = ()) -> Candidate | None:
        """Return the action that misses its last step least. Jobs in `but` are left out."""
        return self._best(self._last, but)

    def first_to_shrink(self, job: str) -> Candidate | None:
        """Return the action of a job that misses its last step least."""
        entry = self._first(self._last, job) if job in self._last else None
        return None if entry is None else entry[-1]

    def rest(self, candidate: Candidate, until: float) -> None:
        """Do not consider an action for growing before `until`; it must be the best to grow of its job."""
        self._next[candidate.waiting.action.job].pop()
        self._resting.push(candidate, until, candidate.waiting.seq)

    def wake(self, now: float) -> bool:
        """Consider again the actions that have rested until `now`, and return whether any action may grow."""
        while (entry := self._resting.first()) is not None and entry[0] <= now:
            candidate = self._resting.pop()
            self._next[candidate.waiting.action.job].push(candidate, -candidate.next_step.gain, candidate.waiting.seq)
        return bool(self._next)

    def _count(self, candidate: Candidate, units: int) -> None:
        job = candidate.waiting.action.job
        self.extra += units
        held = self.extra_by_job.get(job, 0) + units
        if held:
            self.extra_by_job[job] = held
        else:
            self.extra_by_job.pop(job, None)

    def _offer(self, candidate: Candidate) -> None:
        self._versions += 1
        candidate.version = self._versions
        if candidate.taken < len(candidate.steps):
            self._next[candidate.waiting.action.job].push(candidate, -candidate.next_step.gain, candidate.waiting.seq)
        if candidate.taken:
            self._last[candidate.waiting.action.job].push(candidate, candidate.last_step.gain, -candidate.waiting.seq)

    def _best(self, heaps: Heaps, but: Collection[str]) -> Candidate | None:
        best: tuple[Any, ...] | None = None
        for job in tuple(heaps):
            entry = None if job in but else self._first(heaps, job)
            if entry is not None and (best is None or entry < best):
                best = entry
        return None if best is None else best[-1]

    def _first(self, heaps: Heaps, job: str) -> tuple[Any, ...] | None:
        heap = heaps[job]
        while (entry := heap.first()) is not None:
            candidate = entry[-1]
            if candidate.running is None or not candidate.running.stopping:
                return entry
            self.leave(candidate)
        del heaps[job]
        return None
