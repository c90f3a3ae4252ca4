"""How far the actions of a simulation are: the duration model behind virtual time.

An action runs at the speed-up of its units, on whole cores. Where cores are shared it is slowed down like this: it needs
its core for a part r of its own time (`cpu_s / work_s` of the recording; all of it where the recording does not say), and
while it needs it, the others on that core have it for the sum x of their parts. Its own part then takes `1 / (1 - x)`
times as long, at most as many times as there are actions on the core, since time-slices are fair. That is a mean over
bursts that do not know of each other, not a model of single slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.durations import speed_on
from scheduler.model import Grant
from scheduler.trace import TraceAction
from tangram.elasticity import Table


@dataclass(slots=True, eq=False)
class Live:
    """An action that has been submitted and has no result yet. `turn` counts the ends that were planned for it."""

    id: str
    recorded: TraceAction
    submitted_at: float
    carried_queue_s: float
    attempt: int = 0
    units: int = 0
    share: float = 1.0
    core_ids: tuple[int, ...] = ()
    node: str = ""
    restore_s: float = 0.0
    began_at: float = 0.0
    done_s: float = 0.0
    since: float = 0.0
    slower: float = 1.0
    turn: int = 0
    unit_seconds: float = 0.0
    burnt_s: float = 0.0

    @property
    def cores_held(self) -> float:
        """The cores of its grant."""
        return len(self.core_ids) * self.share

    @property
    def busy(self) -> float:
        """The part of its time in which it needs its core."""
        if self.recorded.cpu_s is None or self.recorded.work_s <= 0:
            return 1.0
        return min(1.0, self.recorded.cpu_s / self.recorded.work_s)

    @property
    def speed(self) -> float:
        """Its present speed, in seconds of work a second."""
        return speed_on(self.recorded.elasticity.curve, self.units) / self.slower

    @property
    def _burning(self) -> float:
        """Cores it keeps busy: by Amdahl's law cores wait for the serial part; a table's losses are taken to be burnt."""
        return self.units if isinstance(self.recorded.elasticity.curve, Table) else self.speed

    def begin(self, grant: Grant, now: float, restore_s: float) -> None:
        """Take up a grant; work begins after the restore."""
        self.attempt, self.node = grant.attempt, grant.node
        self.units, self.core_ids, self.share = grant.units, grant.core_ids, grant.share
        self.restore_s = restore_s
        self.began_at = self.since = now + restore_s

    def regrant(self, units: int, core_ids: tuple[int, ...], share: float) -> None:
        """Go on under another grant; what was done must be settled."""
        self.units, self.core_ids, self.share = units, core_ids, share

    def settle(self, now: float) -> None:
        """Count what was done until now."""
        ran_s = max(0.0, now - self.since)
        self.done_s += ran_s * self.speed
        self.unit_seconds += ran_s * self.units * self.share
        self.burnt_s += ran_s * self._burning
        self.since = max(now, self.since)

    def cpu_s_at(self, now: float) -> float:
        """Return the core-seconds used by now."""
        return self.busy * (self.burnt_s + max(0.0, now - self.since) * self._burning)

    def end_at(self) -> float:
        """Return when it ends if nothing changes."""
        return self.since + max(0.0, self.recorded.work_s - self.done_s) / self.speed


class SharedCores:
    """Who is on which core, as far as cores are shared; plans ends anew whenever a pace changes."""

    def __init__(self, plan_end: Callable[[Live], None]) -> None:
        self._plan_end = plan_end
        self._on: dict[tuple[str, int], dict[str, Live]] = {}

    def enter(self, live: Live, now: float) -> None:
        """Let an action go on under its present grant."""
        if live.share < 1.0:
            core = (live.node, live.core_ids[0])
            self._on.setdefault(core, {})[live.id] = live
            self._pace(core, now)
        else:
            live.slower = 1.0
            self._plan(live)

    def leave(self, live: Live, now: float) -> None:
        """Settle an action that ends or changes its grant."""
        live.settle(now)
        if live.share < 1.0:
            core = (live.node, live.core_ids[0])
            del self._on[core][live.id]
            self._pace(core, now)

    def _pace(self, core: tuple[str, int], now: float) -> None:
        members = self._on[core]
        if not members:
            del self._on[core]
            return
        busy = sum(live.busy for live in members.values())
        for live in members.values():
            live.settle(now)
            longer = min(1.0 / max(1.0 - (busy - live.busy), 1e-9), len(members))
            live.slower = 1.0 - live.busy + live.busy * longer
            self._plan(live)

    def _plan(self, live: Live) -> None:
        live.turn += 1
        self._plan_end(live)
