"""The constants of `elastic` on cores, each with its unit and purpose.

Figures are changes of mean ACT by `python -m bench.tuning --trace FILE`, case `rollouts-64-8`: 64 recorded rollouts at 10 times their
speed on 8 cores. Each is the median of three seeds. Constants without a figure have not been measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How `elastic` hands cores over, and gives out spare cores."""

    long: float = 4.0
    """An action is long once its expected work left is this many times that of an action of its job that begins. The others are short.
    2: -0.4 %. 8: +1.6 %."""

    better: float = 1.2
    """An action takes the cores of another one if its expected work left is this many times less. 1: -1.7 %. 2: +0.1 %."""

    turn_after_s: float = 20.0
    """Seconds without a core after which an action gets a turn. It sets the bound. 10: +1.1 %. 40: -0.8 %."""

    turn_s: float = 2.0
    """Seconds for which a turn lasts. 1: -0.8 %. 4: +0.5 %."""

    cores_per_turn: int = 8
    """Cores of a node for each turn that runs at a time; at least one turn runs. It sets T of the bound in docs/scheduling.md."""

    rank_again_s: float = 10.0
    """Seconds after which contenders are ranked anew. Their expected work changes with every action that ends."""

    soonest_s: float = 0.02
    """Least seconds between two rounds whose only cause is a changed expectation."""

    gain_ratio: float = 1.25
    """How many times the marginal gain must be higher for an action to take extra units from another one."""

    least_saving_s: float = 0.05
    """Seconds that growing a running action must be expected to save. A resize costs about a hundredth of this."""

    rest_s: float = 0.5
    """Seconds until an action that is not worth growing is considered again. It may run on for longer than expected."""

    width_charge: float = 1.05
    """Exponent of the charge for a wide grant. With 1, a perfectly scaling action costs the same at any width. The first of several
    then gets all free cores."""

    background_per_core: int = 8
    """Most actions in the background for each core."""

    most_started: int = 1000
    """Most actions under way on a node: each is a thread of the worker. Actions start in the background only below half of this
    number. This leaves room for actions that start on cores."""


TUNING: Final = Tuning()
