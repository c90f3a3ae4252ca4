"""One look at the cores of a group: what is decided so far, before any of it is put into commands."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.model import Running, Waiting
from scheduler.resources.cpu import CoreGroup
from scheduler.resources.ladder import Climber
from scheduler.shares import Shares
from scheduler.state import Node
from tangram.action import CORES


@dataclass(slots=True)
class Look:
    """`free` are the cores that are left once all that is decided so far is carried out.

    `contended` says whether there are several jobs whose shares count. Then `taken` is what that gives to each job, `kept` what
    jobs beyond their share leave free, as worked out last, and actions of the jobs `kept_back` grow no more.
    """

    group: CoreGroup
    node: Node
    now: float
    free: int
    shares: Shares
    contended: bool
    moved: dict[str, tuple[Climber, int]] = field(default_factory=dict)
    starting: list[Climber] = field(default_factory=list)
    on_shares: list[tuple[Waiting, int]] = field(default_factory=list)
    whole: list[Running] = field(default_factory=list)
    kept: float | None = None
    taken: dict[str, int] = field(default_factory=dict)
    kept_back: set[str] = field(default_factory=set)

    def enter(self, climber: Climber) -> None:
        """Start an action on its least amount."""
        self.starting.append(climber)
        self._take(climber, climber.waiting.least)
        if climber.rungs:
            self.group.ladder.enter(climber)

    def climb(self, climber: Climber) -> None:
        """Put an action one rung up."""
        self._note(climber)
        self._take(climber, climber.rungs[climber.at].price)
        self.group.ladder.climb(climber)

    def descend(self, climber: Climber) -> None:
        """Put an action one rung down."""
        self._note(climber)
        self._take(climber, -self.group.ladder.descend(climber))

    def settle(self) -> None:
        """Have jobs hold again what they did before this look: what carries it out counts anew what they hold."""
        if self.contended:
            for job, units in self.taken.items():
                self.shares.hold(job, CORES, -units)

    def _note(self, climber: Climber) -> None:
        """Remember on how many units a running action was before this look."""
        if climber.running is not None:
            self.moved.setdefault(climber.waiting.id, (climber, climber.units))

    def _take(self, climber: Climber, units: int) -> None:
        self.free -= units
        if self.contended:
            job = climber.waiting.action.job
            self.taken[job] = self.taken.get(job, 0) + units
            self.shares.hold(job, CORES, units)  # from now on, so that the rest of this look knows
            self.kept = None
