"""Room on the cores of one node: extra units and holders from which cores are taken back in a round."""

from __future__ import annotations

from collections.abc import Callable, Collection

from scheduler.lanes.look import Look
from scheduler.model import Running
from scheduler.policies.elastic import Elastic
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.foreground import Holder
from scheduler.resources.ladder import Climber
from scheduler.state import State


class Room:
    """Takes cores back, all that are asked for or none."""

    def __init__(self, state: State, policy: Elastic) -> None:
        self._state = state
        self._policy = policy

    def offer(self, group: CoreGroup, running: Running, now: float) -> None:
        """Note what is expected of a holder, which may lose its cores."""
        self._state.note_work(running, now)
        group.foreground.offer(running, self._state.left_s(running.waiting), now + self._state.changes_in_s(running))

    def take_back(self, look: Look, job: str, units: int) -> bool:
        """Take units from jobs beyond their share, for one that is not; extra ones first."""
        fairness = look.fairness
        if not fairness.contended or fairness.comes_last(job):
            return False
        taken = self.shrink_for(look, units, lambda: _protected(look, fairness.gives_up))
        return taken or self.preempt(look, units, lambda holder, lost: fairness.gives_up(holder.job, lost + holder.running.units))

    def shrink_for(self, look: Look, units: int, spared: Callable[[], Collection[str]]) -> bool:
        """Take extra units back until `units` are free, of no `spared` job; False, and nothing taken, where there are not enough."""
        ladder, taken = look.group.ladder, list[Climber]()
        if look.free + (ladder.extra if self._policy.shrinks else 0) < units:
            return False
        while look.free < units:
            climber = ladder.best_down(spared())
            if climber is None:
                break
            look.descend(climber)
            taken.append(climber)
        if look.free >= units:
            return True
        for undone in reversed(taken):
            look.climb(undone)
        return False

    def preempt(self, look: Look, units: int, may_take: Callable[[Holder, int], bool]) -> bool:
        """Send holders to the background, the worst first, until `units` are free; False, and nobody sent, where that is not enough."""
        foreground, found, free = look.group.foreground, list[Holder](), look.free
        lost = dict[str, int]()
        while free < units:
            holder = foreground.worst(look.fairness.comes_last, lambda one: may_take(one, lost.get(one.job, 0)))
            if holder is None:
                break
            foreground.leave(holder.running.waiting.id)
            found.append(holder)
            lost[holder.job] = lost.get(holder.job, 0) + self._units_of(look, holder.running)
            free += self._units_of(look, holder.running)
        enough = free >= units
        for holder in found:
            if enough:
                look.send_to_background(holder.running)
            else:
                self.offer(look.group, holder.running, look.now)
        return enough

    def spared(self, look: Look, job: str, units: int) -> Collection[str]:
        """Return the jobs whose extra units a job may not take, to have some more units itself."""
        fairness = look.fairness
        if not fairness.contended:
            return ()
        return _protected(look, lambda other, loss: fairness.may_take_units(job, units, other, loss))

    def _units_of(self, look: Look, running: Running) -> int:
        climber = look.group.climbers.get(running.waiting.id)
        return climber.units if climber is not None else running.units


def _protected(look: Look, may_lose: Callable[[str, int], bool]) -> list[str]:
    """Return the jobs that may not lose the extra units that are next to go."""
    ladder, found = look.group.ladder, list[str]()
    for job in list(ladder.extra_by_job):
        last = ladder.first_down(job)
        if last is None or not may_lose(job, last.rungs[last.at - 1].price):
            found.append(job)
    return found
