"""Cores: the free ones of a node, and the ones of a pod.

A node's cores are one group. Under a policy with pods, each environment takes cores out of that group for its
whole life and is a group of its own. Which cores a grant gets is a matter of where they lie (`free_cores.py`).

A core is free, held whole by one grant, or shared: then it bears grants of one unit with a `share` below 1, whose shares
add up to at most 1. Shares are halves, quarters and eighths, so that they always fill a core.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.model import Running
from scheduler.policies.abstract import Group, Release
from scheduler.resources.free_cores import Domains, FreeCores
from scheduler.resources.ladder import Climber, Ladder, rungs_within
from scheduler.resources.queue import WaitQueue

PEAK_S = 60.0
"""Time for which the most cores that a job has used at once are remembered."""


@dataclass(slots=True, eq=False)
class Peak:
    """The most cores that a job has used at once in this stretch of `PEAK_S` and in the one before."""

    stretch: int = 0
    now: float = 0.0
    before: float = 0.0
    used: float = 0.0

    def use(self, cores: float, now: float) -> None:
        """Count cores that the job has begun to use, or no longer uses when negative."""
        self.used += cores
        self._turn(now)
        self.now = max(self.now, self.used)

    def most(self, now: float) -> float:
        """Return the most cores that the job has used at once lately."""
        self._turn(now)
        return max(self.now, self.before)

    def _turn(self, now: float) -> None:
        stretch = int(now // PEAK_S)
        if stretch != self.stretch:
            self.before = self.now if stretch == self.stretch + 1 else self.used
            self.now, self.stretch = self.used, stretch


class CoreGroup(Group):
    """Interchangeable cores with a queue of the actions that are bound to them."""

    def __init__(self, node: str, domains: Domains) -> None:
        self.node = node
        self._free = FreeCores(domains)
        self.capacity = self._free.count
        self.queue = WaitQueue()
        self.running: dict[str, Running] = {}
        self.ladder = Ladder()
        self.climbers: dict[str, Climber] = {}
        self.light: dict[str, Running] = {}
        """Actions on a whole core of their own that could do with a share of one."""
        self.sharing: dict[str, Running] = {}
        """Actions on a share of a core."""
        self.room: dict[int, float] = {}
        """What is left of each shared core."""
        self.peaks: dict[str, Peak] = {}
        self.kept = 0.0
        """Cores that are kept for jobs within their share, as worked out last; to be worked out anew from `kept_until` on."""
        self.kept_until = 0.0

    @property
    def free(self) -> int:
        """Whole cores that can be granted now."""
        return self._free.count

    @property
    def free_ids(self) -> list[int]:
        """Their ids, in ascending order."""
        return self._free.ids()

    def pod(self, core_ids: Iterable[int]) -> CoreGroup:
        """Return a group of some of these cores, in which they lie as they lie here."""
        return CoreGroup(self.node, self._free.only(core_ids))

    def releases(self) -> Iterable[Release]:
        """Return the expected ends of what runs on these cores."""
        return (Release(running.expected_end, len(running.grant.core_ids)) for running in self.running.values())

    def enter(self, running: Running, now: float, climber: Climber | None = None) -> None:
        """Note what runs on these cores; `climber` is it on the group's ladder already, where it is elastic."""
        action_id = running.waiting.id
        self._use(running.waiting.action.job, len(running.grant.core_ids) * running.grant.share, now)
        self.running[action_id] = running
        if climber is not None:
            climber.running = running
            self.climbers[action_id] = climber
        self._note_share(running)

    def adopt(self, running: Running, now: float, *, resizes: bool) -> None:
        """Note what an earlier scheduler had started here, and put it on the rung that it stands on where it may be resized."""
        waiting = running.waiting
        rungs = rungs_within(waiting, self.capacity) if resizes else ()
        at = sum(rung.units <= running.units for rung in rungs)
        climber = Climber(waiting, rungs, running, at)
        if rungs and climber.units == running.units == len(running.grant.core_ids):
            self.ladder.enter(climber)
            self.enter(running, now, climber)
        else:
            self.enter(running, now)

    def regranted(self, running: Running, more: float, now: float) -> None:
        """Note that an action goes on with `more` cores, or fewer when negative."""
        self._use(running.waiting.action.job, more, now)
        self._note_share(running)

    def _note_share(self, running: Running) -> None:
        """Note whether an action is on a share of a core, or could be."""
        action_id = running.waiting.id
        self.light.pop(action_id, None)
        self.sharing.pop(action_id, None)
        if running.grant.share < 1.0:
            self.sharing[action_id] = running
        elif running.waiting.share < 1.0 and running.units == 1 and len(running.grant.core_ids) == 1 and not running.hungry:
            self.light[action_id] = running

    def leave(self, running: Running, now: float) -> None:
        """Forget what ran, and take its cores back."""
        action_id = running.waiting.id
        self._use(running.waiting.action.job, -len(running.grant.core_ids) * running.grant.share, now)
        self.running.pop(action_id, None)
        self.light.pop(action_id, None)
        self.sharing.pop(action_id, None)
        climber = self.climbers.pop(action_id, None)
        if climber is not None:
            self.ladder.leave(climber)
        if running.grant.share < 1.0:
            self.give_back_share(running.grant.core_ids[0], running.grant.share)
        else:
            self.give_back(running.grant.core_ids)

    def take(self, count: int, near: Iterable[int] = ()) -> tuple[int, ...]:
        """Take `count` free cores that lie together; with `near`, the cores held already, close to these.

        Raises `ValueError` where there are fewer.
        """
        if count > self._free.count:
            raise ValueError(f"{count} cores wanted of {self._free.count} free ones on {self.node}")
        return self._free.take(count, near)

    def shrink(self, core_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Take back all but `count` of the cores that a grant holds; return those that it keeps, which lie together."""
        return self._free.shrink(core_ids, count)

    def claim(self, core_ids: Iterable[int]) -> tuple[int, ...]:
        """Take these very cores as far as they are free, for a grant made by an earlier scheduler; return those taken."""
        return tuple(core_id for core_id in core_ids if self._free.claim(core_id))

    def claim_share(self, core_id: int, share: float) -> bool:
        """Take a share of this very core, for a grant made by an earlier scheduler; False where it is not to be had."""
        if self.room.get(core_id, 0.0) >= share:
            self.room[core_id] -= share
            return True
        if not self._free.claim(core_id):
            return False
        self.room[core_id] = 1.0 - share
        return True

    def give_back(self, core_ids: Sequence[int]) -> None:
        """Return cores that were taken."""
        self._free.give_back(core_ids)

    def take_share(self, share: float) -> int | None:
        """Take a share of the fullest shared core that has room; None where none has."""
        core_id = min((core for core, room in self.room.items() if room >= share), key=lambda core: (self.room[core], core), default=None)
        if core_id is not None:
            self.room[core_id] -= share
        return core_id

    def open_share(self, core_id: int, share: float) -> None:
        """Make a core that a grant holds whole a shared one, of which that grant keeps `share`."""
        self.room[core_id] = 1.0 - share

    def give_back_share(self, core_id: int, share: float) -> None:
        """Return a share of a core; a core that nobody shares any more is free."""
        self.room[core_id] += share
        if self.room[core_id] >= 1.0:
            del self.room[core_id]
            self._free.give_back((core_id,))

    def resize(self, capacity_delta: int) -> None:
        """Change the capacity by cores that pods take out of the group or bring back."""
        self.capacity += capacity_delta

    def used_by(self, job: str) -> float:
        """Return the cores that a job uses here."""
        peak = self.peaks.get(job)
        return peak.used if peak is not None else 0.0

    def peak_of(self, job: str, now: float) -> float:
        """Return the most cores that a job has used here at once lately."""
        peak = self.peaks.get(job)
        return peak.most(now) if peak is not None else 0.0

    def forget_peaks(self, now: float) -> None:
        """Forget the jobs that have used nothing lately."""
        for job in [job for job, peak in self.peaks.items() if peak.used <= 0 and peak.most(now) <= 0]:
            del self.peaks[job]

    def _use(self, job: str, cores: float, now: float) -> None:
        """Count cores that a job has begun to use, or no longer uses when negative."""
        peak = self.peaks.get(job)
        if peak is None:
            peak = self.peaks[job] = Peak()
        peak.use(cores, now)
