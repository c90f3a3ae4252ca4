"""The constants of `elastic` on cores, each with its unit and what it is for.

Figures are changes of mean ACT by `python -m bench.tuning --trace FILE`, case `rollouts-64-8`: 64 recorded rollouts at 10 times their
speed on 8 cores. Each is the median of three seeds. Those without a figure have not been measured by it yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How `elastic` hands cores over and gives out what is left."""

    better: float = 1.2
    """How many times less work must be expected of an action for it to take the cores of another one. 1: -2.5 % (-5.2 to
    +0.2 by seed). 2: +0.4 %."""

    turn_after_s: float = 20.0
    """Seconds without a core after which an action gets a turn. It sets the bound. 10: -0.5 %. 40: +0.4 %."""

    turn_s: float = 2.0
    """Seconds for which a turn lasts. 1: -0.7 %. 4: +0.8 %."""

    cores_per_turn: int = 8
    """Cores of a node for each turn that runs at a time; at least one turn runs."""

    rank_again_s: float = 10.0
    """Seconds after which contenders are ranked anew, since what is expected of them changes with every action that ends."""

    soonest_s: float = 0.02
    """Least seconds between two rounds that only an expectation has brought about."""

    gain_ratio: float = 1.25
    """How many times the marginal gain must be higher for an action to take extra units from another one."""

    least_saving_s: float = 0.05
    """Seconds that growing a running action must be expected to save: some hundred times what a resize costs."""

    rest_s: float = 0.5
    """Seconds until an action that is not worth growing is considered again: it may run on for longer than expected."""

    width_charge: float = 1.05
    """Exponent of the charge for a wide grant. With 1, an action that scales perfectly costs nothing more however wide it runs,
    and the first of several such has all that is free."""

    background_per_core: int = 8
    """Actions in the background, for each core, up to which another one starts there."""

    most_started: int = 1000
    """Actions under way on a node up to which another one starts: each is a thread of the worker. Half as many may start in the
    background, so that there is room for those that start on cores."""


TUNING: Final = Tuning()
