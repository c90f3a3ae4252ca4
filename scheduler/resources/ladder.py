"""Who could use how many more units, and who would miss them least: the elastic actions of one group, kept in order.

Each elastic action stands on a ladder. A *rung* leads from one of its amounts to a larger one; what it is worth is
`ln(speed after / speed before)` per unit. Giving every unit to the highest rung there is makes the product of all
speeds largest (proportional fairness; F. Kelly 1997). Why that, and not the least sum of remaining seconds, which the
paper's programme finds: that sum favours long actions, since they have most seconds to save, while units given to the
action that is soonest done come back soonest. And it needs no duration to be known: a rung's worth does not change with
time.

So the order is kept, not computed: a decision costs what it changes, O(log n) a rung, however many actions run.
Entries of the heaps are not removed when an action moves on; each bears the turn it was made in.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from scheduler.durations import speed_on
from scheduler.model import Running, Waiting
from scheduler.policies.allocation import steps_of
from tangram.elasticity import FLAT, Curve


class Rung(NamedTuple):
    """A step to a larger amount: its worth per unit, the units it costs, and the amount reached."""

    worth: float
    price: int
    units: int


@lru_cache(maxsize=4096)
def rungs_of(units: tuple[int, ...], curve: Curve) -> tuple[Rung, ...]:
    """Return the rungs of some amounts on a curve, ever less worth; none where more units do nothing."""
    if len(units) < 2 or curve is FLAT:
        return ()
    logs = [-math.log(speed_on(curve, amount)) for amount in units]
    spread = max(logs[0] - min(logs), 1e-9)
    steps = steps_of(units, [spread + value - logs[0] for value in logs])
    return tuple(Rung(worth, price, units[target]) for worth, target, price in steps)


def rungs_within(waiting: Waiting, units: int) -> tuple[Rung, ...]:
    """Return an action's rungs as far as they lead to at most `units`."""
    rungs = rungs_of(waiting.units, waiting.estimate.curve)
    return rungs if not rungs or rungs[-1].units <= units else tuple(rung for rung in rungs if rung.units <= units)


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


@dataclass(slots=True, eq=False)
class Ladder:
    """The climbers of one group. `extra` are the units that they hold above their smallest amounts."""

    extra: int = 0
    extra_by_job: dict[str, int] = field(default_factory=dict)
    _ups: list[Entry] = field(default_factory=list)
    _downs: list[Entry] = field(default_factory=list)
    _resting: list[Entry] = field(default_factory=list)

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

    def best_up(self) -> Climber | None:
        """Return who is worth the next unit most."""
        return self._first(self._ups)

    def best_down(self) -> Climber | None:
        """Return who misses its last units least."""
        return self._first(self._downs)

    def rest(self, climber: Climber, until: float) -> None:
        """Look at an action as one to grow no more before `until`; it must be the best up."""
        heapq.heappop(self._ups)
        heapq.heappush(self._resting, (until, climber.waiting.seq, climber.turn, climber))

    def set_aside(self) -> Entry:
        """Take the best up out for a moment; `put_back` what this returns."""
        return heapq.heappop(self._ups)

    def put_back(self, entry: Entry) -> None:
        """Put back what was set aside."""
        heapq.heappush(self._ups, entry)

    def set_down_aside(self) -> Entry:
        """Take the best down out for a moment; `put_down_back` what this returns."""
        return heapq.heappop(self._downs)

    def put_down_back(self, entry: Entry) -> None:
        """Put back what was set aside."""
        heapq.heappush(self._downs, entry)

    def wake(self, now: float) -> None:
        """Look again at those that have rested until `now`."""
        while self._resting and self._resting[0][0] <= now:
            _, seq, turn, climber = heapq.heappop(self._resting)
            if not climber.gone and turn == climber.turn:
                heapq.heappush(self._ups, (-climber.rungs[climber.at].worth, seq, turn, climber))

    def _count(self, climber: Climber, units: int) -> None:
        job = climber.waiting.action.job
        self.extra += units
        held = self.extra_by_job.get(job, 0) + units
        if held:
            self.extra_by_job[job] = held
        else:
            self.extra_by_job.pop(job, None)

    def _offer(self, climber: Climber) -> None:
        climber.turn += 1
        if climber.at < len(climber.rungs):
            heapq.heappush(self._ups, (-climber.rungs[climber.at].worth, climber.waiting.seq, climber.turn, climber))
        if climber.at:
            heapq.heappush(self._downs, (climber.rungs[climber.at - 1].worth, -climber.waiting.seq, climber.turn, climber))

    def _first(self, heap: list[Entry]) -> Climber | None:
        while heap:
            _, _, turn, climber = heap[0]
            if not climber.gone and turn == climber.turn:
                if climber.running is None or not climber.running.stopping:
                    return climber
                self.leave(climber)
            heapq.heappop(heap)
        return None
