"""The constants of the elastic dispatcher for GPU cells, each with the measurement that justifies it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Figures are changes of mean ACT in simulations of several seeds, unless they say otherwise.

    "24 GPUs" stands for 2048 trajectories of the MOPD workload of `bench/workloads.py` on 24 GPUs. "Long restores" stands for restores
    of 5 s and actions of 0.1 to 0.5 s.
    """

    aged_s: float = 15.0
    """Seconds after which a line has aged. It sets the bound: 8 and 30 s give the same mean ACT to within 2 %."""

    turn_s: float = 5.0
    """Seconds from when a busy instance was brought in which no starving line makes it evict. Without turns, twelve services that need
    twice the work of two GPUs take 2.7 times as many restores: +26 %. 10 s: -4 %, with a longer bound."""

    soon_restores: float = 2.0
    """Restores of its service that a line rather waits for a place than be brought one more instance. 1: 20 times as many restores where
    restores are long. 4: +8 % on 32 GPUs, +10 % on 24."""

    overload: float = 2.0
    """How many times as many of an overloaded line wait as should start soon. 1.5: +4 % on 16 GPUs where five services fit on a GPU.
    3: +7 % where one service has more to do than large instances can."""

    ahead_durations: float = 1.25
    """Durations of an action within which actions that should come count as if they waited. 0: +13 % on 24 GPUs. 2: +10 % on 32."""

    restored_share: float = 0.3
    """Part of a restore that is added to each action where sizes are compared. 0: +42 % on 24 GPUs. 1: +15 % on 32. The part that is
    measured would mislead: it is lowest where many small instances leave nothing to restore."""

    wait_advantage: float = 2.0
    """How many times as much time an eviction must cost others as waiting for a cheaper eviction. Without such waiting: 2.4 times the mean
    ACT where restores are long and two GPUs serve one popular service and two others. 1: +1 % on 24 GPUs, +2 % on 40."""

    fading: float = 8.0
    """Durations of an action, of at least 1 s, after which an arrival counts for 1/e in the demand for its service. 4: +2 % on 32
    GPUs. 16: -4 % there, +1 to +2 % on 24."""

    place_offset: float = 0.5
    """What is added to the places of a line where lines are ranked by how many wait for each place. 0: +1 % on 32 GPUs. 1: +1.5 %."""


TUNING = Tuning()
