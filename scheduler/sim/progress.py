"""How far the actions of a simulation are: the duration model behind virtual time.

An action runs at the speed-up of its units, on cores of its own. It keeps them busy for a fraction of its time: `cpu_s / work_s` of the
recording, or all of it if the recording does not say.

An action in the background gets the idle time of its node: cores that no action holds, and the time in which a holder leaves its
cores idle. The kernel divides this time evenly. So each action gets the same fraction f of a core while it needs a core. Its waits for
a network or a timer take as long as before. An action that needs a core for a fraction r of its time takes `(1 - r) + r / f` times as
long. This is a mean over independent moments, not a model of single time slices. An action uses one core at most. The
time that its work in the background would take on a core of its own is execution. The rest is the background part of its ACT.

Actions with equal needs (to a sixteenth) share a clock. So a change of the idle time costs the same for any number of actions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from scheduler.learning.durations import speed_on
from scheduler.model import Grant
from scheduler.model.lifecycle import End
from scheduler.sim.trace import TraceAction
from tangram.elasticity import Table

NEED_STEPS: Final = 16
"""Steps in which needs of a core are distinguished in the background."""

ROUNDED_S: Final = 1e-6
"""Work that may be missing by rounding."""


@dataclass(slots=True, eq=False)
class Live:
    """An action that has been submitted and has no result yet. `version` counts its planned ends; an earlier one is void.

    An action is `halted` until its program has started, and while it waits for memory. Meanwhile it keeps no core busy, and its work stands
    still. `ran_s` is its execution so far.
    """

    id: str
    recorded: TraceAction
    submitted_at: float
    carried_queue_s: float
    attempt: int = 0
    units: int = 0
    core_ids: tuple[int, ...] = ()
    background: bool = False
    node: str = ""
    overhead_s: float = 0.0
    began_at: float = 0.0
    done_s: float = 0.0
    ran_s: float = 0.0
    since: float = 0.0
    version: int = 0
    unit_seconds: float = 0.0
    cpu_s: float = 0.0
    waited_s: float = 0.0
    slept_s: float = 0.0
    background_cpu_s: float = 0.0
    told_cpu_s: float = 0.0
    clock_s: float = 0.0
    halted: bool = False

    @property
    def busy(self) -> float:
        """The fraction of its time in which the action needs its core."""
        return self.recorded.busy

    @property
    def speed(self) -> float:
        """Its speed on cores of its own, in seconds of work a second."""
        return speed_on(self.recorded.elasticity.curve, self.units)

    @property
    def burning(self) -> float:
        """The cores that the action keeps busy. By Amdahl's law, some wait for the serial part. With a table, losses are burnt."""
        return self.busy * (self.units if isinstance(self.recorded.elasticity.curve, Table) else self.speed)

    @property
    def left_s(self) -> float:
        """The remaining work, as far as the time limit allows."""
        left_s = max(0.0, self.recorded.work_s - self.done_s)
        if self.recorded.timeout_s is None:
            return left_s
        return min(left_s, max(0.0, self.recorded.timeout_s - self.ran_s) * (1.0 if self.background else self.speed))

    def end(self) -> tuple[End, str]:
        """Return how the action ends now, with the reason."""
        limit_s = self.recorded.timeout_s
        if limit_s is None or self.recorded.work_s - self.done_s <= ROUNDED_S:
            return "succeeded", ""
        return "timed_out", f"ran longer than {limit_s:g} s"

    def begin(self, grant: Grant, now: float, overhead_s: float) -> None:
        """Take up a grant. Work begins after `overhead_s`, which includes a restore."""
        self.attempt, self.node = grant.attempt, grant.node
        self.units, self.core_ids, self.background = grant.units, grant.core_ids, grant.background
        self.overhead_s = overhead_s
        self.began_at = self.since = now + overhead_s

    def regrant(self, core_ids: tuple[int, ...], *, background: bool) -> None:
        """Go on under another grant. Settle the earlier work first."""
        self.units, self.core_ids, self.background = len(core_ids) or self.units, core_ids, background

    def settle(self, now: float) -> None:
        """Count the work on the action's own cores until now."""
        ran_s = max(0.0, now - self.since)
        self.done_s += ran_s * self.speed
        self.ran_s += ran_s
        self.unit_seconds += ran_s * self.units
        self.cpu_s += ran_s * self.burning
        self.since = max(now, self.since)

    def got_on(self, work_s: float, now: float) -> None:
        """Count work that was done in the background until now."""
        cpu_s, ran_s = work_s * self.busy, work_s * min(1.0, self.busy)
        self.done_s += work_s
        self.ran_s += work_s
        self.cpu_s += cpu_s
        self.background_cpu_s += cpu_s
        waited_s = max(0.0, now - self.since - ran_s)
        self.waited_s += waited_s
        self.slept_s += min(waited_s, work_s - ran_s)
        self.since = now


@dataclass(slots=True, eq=False)
class _Clock:
    """The clock of background actions that need a core for the same fraction `need` of their time, or the same number of cores.

    `elapsed_s` is the work of each since the start.
    """

    need: float
    elapsed_s: float = 0.0
    speed: float = 0.0
    count: int = 0
    ends: list[tuple[float, int, int, Live]] = field(default_factory=list)

    def next_end_s(self) -> float:
        """Return the seconds until the first action ends."""
        while self.ends and self.ends[0][2] != self.ends[0][3].version:
            heapq.heappop(self.ends)
        if not self.ends:
            return math.inf
        left_s = max(0.0, self.ends[0][0] - self.elapsed_s)
        if left_s <= 1e-12:
            return 0.0
        return left_s / self.speed if self.speed > 0 else math.inf


class NodeCores:
    """The cores of one node: the actions that keep them busy, and the actions that get idle time.

    `plan(at, call)` makes the simulation call `call(at)` at time `at`.
    """

    def __init__(self, capacity: int, ended: Callable[[Live, float], None], plan: Callable[[float, Callable[[float], None]], None]) -> None:
        self._capacity, self._ended, self._plan = capacity, ended, plan
        self._clocks: dict[int, _Clock] = {}
        self._busy = 0.0
        self._since = 0.0
        self._order = 0
        self._planned = 0
        self.background: dict[str, Live] = {}

    def enter(self, live: Live, now: float) -> None:
        """Let an action go on under its present grant."""
        live.version += 1
        if live.background:
            self._advance(now)
            self._join(live, now)
        else:
            self._busy += live.burning
            self._plan(live.since + live.left_s / live.speed, self._at_end_of(live))
        self._pace(now)

    def leave(self, live: Live, now: float) -> None:
        """Settle an action that ends or changes its grant."""
        live.version += 1
        if live.background:
            self._advance(now)
            clock = self._clocks[round(live.busy * NEED_STEPS)]
            clock.count -= 1
            del self.background[live.id]
            live.got_on(clock.elapsed_s - live.clock_s, now)
            live.clock_s = clock.elapsed_s
        else:
            live.settle(now)
            self._busy -= live.burning
        self._pace(now)

    def settle_background(self, now: float) -> None:
        """Count the work of background actions until now."""
        self._advance(now)
        for live in self.background.values():
            clock = self._clocks[round(live.busy * NEED_STEPS)]
            live.got_on(clock.elapsed_s - live.clock_s, now)
            live.clock_s = clock.elapsed_s

    def _at_end_of(self, live: Live) -> Callable[[float], None]:
        version = live.version

        def end(now: float) -> None:
            if live.version == version:
                self._ended(live, now)

        return end

    def _join(self, live: Live, now: float) -> None:
        steps = round(live.busy * NEED_STEPS)
        clock = self._clocks.setdefault(steps, _Clock(steps / NEED_STEPS))
        clock.count += 1
        live.clock_s, live.since = clock.elapsed_s, now
        self._order += 1
        heapq.heappush(clock.ends, (clock.elapsed_s + live.left_s, self._order, live.version, live))
        self.background[live.id] = live

    def _advance(self, now: float) -> None:
        for clock in self._clocks.values():
            clock.elapsed_s += clock.speed * (now - self._since)
        self._since = now

    def _pace(self, now: float) -> None:
        """Divide the idle time anew, and plan the next end in the background."""
        if not self.background:
            return
        self._advance(now)
        fraction = self._core_fraction(max(0.0, self._capacity - self._busy))
        for clock in self._clocks.values():
            clock.speed = _speed(clock.need, fraction)
        next_s = min(clock.next_end_s() for clock in self._clocks.values())
        self._planned += 1
        if next_s < math.inf:
            planned = self._planned

            def end(now: float) -> None:
                if planned == self._planned:
                    self._end_first(now)

            self._plan(now + next_s, end)

    def _core_fraction(self, idle: float) -> float:
        """Return the fraction of a core for each action that needs a core, so that all actions use up the idle time."""
        needy = [clock for clock in self._clocks.values() if clock.count and clock.need]
        if idle <= 1e-9:
            return 0.0
        if sum(clock.count * clock.need for clock in needy) <= idle:
            return 1.0
        if len(needy) == 1 and needy[0].need == 1.0:
            return idle / needy[0].count
        low, high = 0.0, 1.0
        for _ in range(16):
            middle = (low + high) / 2
            if sum(clock.count * clock.need * _speed(clock.need, middle) for clock in needy) > idle:
                high = middle
            else:
                low = middle
        return low

    def _end_first(self, now: float) -> None:
        self._advance(now)
        clock = min(self._clocks.values(), key=lambda clock: clock.next_end_s())
        if clock.next_end_s() > 1e-9:  # rounding
            self._pace(now)
            return
        live = clock.ends[0][3]
        self._ended(live, now)


def _speed(need: float, fraction: float) -> float:
    """Return the work a second of an action that needs a core for `need` of its time, and then gets `fraction` of a core.

    One that needs several cores all the time gets that fraction of each.
    """
    if fraction <= 0.0:
        return 0.0 if need else 1.0
    if need >= 1.0:
        return fraction
    return fraction / ((1.0 - need) * fraction + need)
