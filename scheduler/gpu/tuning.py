"""The constants of the elastic dispatcher for GPU cells, each with the measurement that justifies it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The constants. Figures are changes of mean ACT in simulations of several seeds, unless a constant says otherwise.

    "24 GPUs" means 2048 trajectories of the MOPD workload of `bench/workloads.py` on 24 GPUs. "Long restores" means restores of 5 s
    and actions of 0.1 to 0.5 s.
    """

    aged_s: float = 15.0
    """Seconds after which a queue has aged. It sets the bound: 8 and 30 s give the same mean ACT to within 2 %."""

    turn_s: float = 5.0
    """Seconds for which a busy instance is protected from starving queues after it was brought. Without turns, and with twelve
    services that need twice the work of two GPUs: 2.7 times as many restores, +26 %. 10 s: -4 %, with a longer bound."""

    soon_restores: float = 2.0
    """A queue waits for a place, and is brought no instance, if the place falls free within this many restores of its service. 1: 20
    times as many restores where restores are long. 4: +8 % on 32 GPUs, +10 % on 24."""

    overload: float = 2.0
    """A queue is overloaded when this many times as many of its actions wait as should start soon. 1.5: +4 % on 16 GPUs where five
    services fit on a GPU. 3: +7 % where one service has more work than large instances can do."""

    ahead_durations: float = 1.25
    """Durations of an action for which expected arrivals count as waiting. 0: +13 % on 24 GPUs. 2: +10 % on 32."""

    restored_share: float = 0.3
    """Part of a restore that is added to each action to compare sizes. 0: +42 % on 24 GPUs. 1: +15 % on 32. The measured part would
    mislead. It is lowest where many small instances leave nothing to restore."""

    wait_advantage: float = 2.0
    """A queue waits for a cheaper eviction if the present one costs this many times as much time. Without waiting: 2.4 times the
    mean ACT where restores are long and two GPUs serve one popular and two other services. 1: +1 % on 24 GPUs, +2 % on 40."""

    fading: float = 8.0
    """An arrival counts for 1/e in the demand for its service after this many durations of an action, each of at least 1 s. 4: +2 %
    on 32 GPUs. 16: -4 % there, +1 to +2 % on 24."""

    place_offset: float = 0.5
    """A number that is added to the places of a queue. Queues are ranked by their waiting actions for each place. 0: +1 % on 32 GPUs.
    1: +1.5 %."""


TUNING = Tuning()
