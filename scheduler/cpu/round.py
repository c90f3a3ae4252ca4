"""One round over the cores of a group: its decisions before they are put into commands."""

from __future__ import annotations

from collections.abc import Callable, Collection

from scheduler.cpu.cores import CoreGroup
from scheduler.cpu.fairness import Fairness
from scheduler.cpu.marginal import Candidate, Step
from scheduler.cpu.occupants import Occupant
from scheduler.cpu.tuning import TUNING
from scheduler.model import Running, Waiting
from scheduler.model.queue import Contenders
from scheduler.model.shares import Shares
from tangram.action import CORES

MayTake = Callable[[str, int], bool]
"""Says whether a job may lose so many units."""


class Round:
    """The decisions of one round.

    The actions of `queues` may start on the group. `free` and `memory_free` are the cores, and the memory in MB, that remain after all
    decisions so far. Actions that are `entering` get cores, for the first time or after a time in the background; `turns` are the ids of
    those that get them for a turn. Running actions that are `moved` grow or shrink, each with its units before the round; those that are
    `preempted` lose all their cores.
    """

    def __init__(
        self, group: CoreGroup, queues: list[Contenders], now: float, shares: Shares, fairness: Fairness, *, shrinks: bool
    ) -> None:
        self.group = group
        self.queues = queues
        self.node = group.node
        self.now = now
        self.fairness = fairness
        self.free = group.free
        # Below 0 where an environment has used the reserve: what needs no memory of its own starts all the same.
        self.memory_free = max(0, group.node.memory_free)
        self.entering: list[Candidate] = []
        self.turns: dict[str, None] = {}
        self.moved: dict[str, tuple[Candidate, int]] = {}
        self.preempted: dict[str, Running] = {}
        self._shares = shares
        self._shrinks = shrinks
        self._taken: dict[str, int] = {}

    def enter(self, candidate: Candidate) -> None:
        """Give an action its least amount."""
        self.entering.append(candidate)
        self._take(candidate.waiting, candidate.waiting.least)
        if candidate.steps:
            self.group.marginal.enter(candidate)

    def grow(self, candidate: Candidate) -> None:
        """Have an action take its next step."""
        self._note(candidate)
        self._take(candidate.waiting, candidate.next_step.extra_units)
        self.group.marginal.grow(candidate)

    def shrink(self, candidate: Candidate) -> None:
        """Have an action take its last step back."""
        self._note(candidate)
        self._take(candidate.waiting, -candidate.last_step.extra_units)
        self.group.marginal.shrink(candidate)

    def shrink_others(self, units: int, may_take: MayTake, *, to_gain: Step | None = None) -> bool:
        """Take extra units back until `units` are free, first from the action that misses them least.

        If there are not enough, take nothing and return False. `to_gain` is the step that needs the units. It must gain
        `TUNING.gain_ratio` times as much as the actions lose, for each taken step and for all of them together.
        """
        taken, lost = list[Candidate](), 0.0
        if not self._shrinks or self.free + self.group.marginal.extra < units:
            return self.free >= units
        while self.free < units:
            other = self.group.marginal.best_to_shrink(self._protected(may_take))
            if other is None:
                break
            loss = other.last_step
            lost += loss.gain * loss.extra_units
            if to_gain is not None and TUNING.gain_ratio * max(loss.gain / to_gain.gain, lost / (to_gain.gain * to_gain.extra_units)) > 1.0:
                break
            self.shrink(other)
            taken.append(other)
        if self.free >= units:
            return True
        for undone in reversed(taken):
            self.grow(undone)
        return False

    def preempt(self, units: int, may_lose: Callable[[Occupant, int], bool]) -> bool:
        """Send occupants to the background until `units` are free, in their order.

        `may_lose` says whether an occupant may lose its cores if its job loses so many units in all. If there are not enough, send
        no occupant and return False.
        """
        occupants, found, free = self.group.occupants, list[Occupant](), self.free
        lost = dict[str, int]()
        while free < units:
            occupant = occupants.first(
                self.fairness.deprioritised, lambda one: may_lose(one, lost.get(one.job, 0) + self._units_of(one.running))
            )
            if occupant is None:
                break
            occupants.leave(occupant.running.waiting.id)
            found.append(occupant)
            lost[occupant.job] = lost.get(occupant.job, 0) + self._units_of(occupant.running)
            free += self._units_of(occupant.running)
        for occupant in found:
            if free >= units:
                self._send_to_background(occupant.running)
            else:
                occupants.offer(occupant.running, occupant.rank, occupant.refresh_at)
        return free >= units

    def settle(self) -> None:
        """Undo the counts of this round in the jobs' shares. Carrying the round out counts them again."""
        if self.fairness.contended:
            for job, units in self._taken.items():
                self._shares.hold(job, CORES, -units)

    def _send_to_background(self, running: Running) -> None:
        action_id = running.waiting.id
        candidate = self.group.candidates.get(action_id)
        self._take(running.waiting, -self._units_of(running))
        self.preempted[action_id] = running
        self.moved.pop(action_id, None)
        if candidate is not None:
            self.group.marginal.leave(candidate)

    def _protected(self, may_take: MayTake) -> Collection[str]:
        """Return the jobs that may not lose their next extra units."""
        if not self.fairness.contended:
            return ()
        marginal, found = self.group.marginal, list[str]()
        for job in list(marginal.extra_by_job):
            first = marginal.first_to_shrink(job)
            if first is None or not may_take(job, first.last_step.extra_units):
                found.append(job)
        return found

    def _units_of(self, running: Running) -> int:
        candidate = self.group.candidates.get(running.waiting.id)
        return candidate.units if candidate is not None else running.units

    def _note(self, candidate: Candidate) -> None:
        """Remember the units of a running action before this round."""
        if candidate.running is not None and not candidate.running.grant.background:
            self.moved.setdefault(candidate.waiting.id, (candidate, candidate.units))

    def _take(self, waiting: Waiting, units: int) -> None:
        self.free -= units
        if self.fairness.contended:
            job = waiting.action.job
            self._taken[job] = self._taken.get(job, 0) + units
            self._shares.hold(job, CORES, units)  # from now on, so that the rest of this round knows
