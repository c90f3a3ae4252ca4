"""One round over the cores of a group: what is decided so far, before any of it is put into commands."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.lanes.fairness import Fairness
from scheduler.model import Running, Waiting
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.ladder import Climber
from scheduler.shares import Shares
from scheduler.state import Node
from tangram.action import CORES


@dataclass(slots=True)
class Look:
    """`free` and `memory_free` are the cores and the memory that are left once all that is decided so far is carried out.

    `moved` are running actions that grow or shrink, with the units that they had; `entering` those that get their first cores, new ones and
    those of the background; `leaving` those that lose all of theirs; `turns` those that get theirs for their turn.
    """

    group: CoreGroup
    node: Node
    now: float
    free: int
    memory_free: int
    shares: Shares
    fairness: Fairness
    moved: dict[str, tuple[Climber, int]] = field(default_factory=dict)
    entering: list[Climber] = field(default_factory=list)
    leaving: dict[str, Running] = field(default_factory=dict)
    turns: dict[str, None] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)

    def enter(self, climber: Climber) -> None:
        """Give an action its least amount."""
        self.entering.append(climber)
        self._take(climber.waiting, climber.waiting.least)
        if climber.rungs:
            self.group.ladder.enter(climber)

    def climb(self, climber: Climber) -> None:
        """Put an action one rung up."""
        self._note(climber)
        self._take(climber.waiting, climber.rungs[climber.at].price)
        self.group.ladder.climb(climber)

    def descend(self, climber: Climber) -> None:
        """Put an action one rung down."""
        self._note(climber)
        self._take(climber.waiting, -self.group.ladder.descend(climber))

    def send_to_background(self, running: Running) -> None:
        """Take all cores of a running action."""
        waiting = running.waiting
        climber = self.group.climbers.get(waiting.id)
        self.leaving[waiting.id] = running
        self.moved.pop(waiting.id, None)
        self._take(waiting, -(climber.units if climber is not None else running.units))
        self.group.foreground.leave(waiting.id)
        if climber is not None:
            self.group.ladder.leave(climber)

    def settle(self) -> None:
        """Have jobs hold again what they did before this round: what carries it out counts anew what they hold."""
        if self.fairness.contended:
            for job, units in self.taken.items():
                self.shares.hold(job, CORES, -units)

    def _note(self, climber: Climber) -> None:
        """Remember on how many units a running action was before this round."""
        if climber.running is not None and not climber.running.grant.background:
            self.moved.setdefault(climber.waiting.id, (climber, climber.units))

    def _take(self, waiting: Waiting, units: int) -> None:
        self.free -= units
        if self.fairness.contended:
            job = waiting.action.job
            self.taken[job] = self.taken.get(job, 0) + units
            self.shares.hold(job, CORES, units)  # from now on, so that the rest of this round knows
