"""What `bench.live` replays: the bundled rollouts, without what does not run on cores.

Every system under comparison builds its trace here, so that all replay the same trajectories, arrivals and think times.

Commands take as long as the machine needs for them, while think times are recorded. On a machine half as fast the same trace is
twice the load, and where all cores are always busy every scheduler ends at the same time. So think times and arrivals are
stretched by the *pace*: how many times as long as recorded the commands take here (`pace.py`). That keeps the
load that was recorded.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from app.demo import BUNDLED
from app.traces import read_trace
from scheduler.trace import DEFAULT_PRIORITY, Step, Trace, Trajectory, tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How much is replayed: `trajectories` of them, arriving over `spread_s` seconds; think times are divided by `speed`.

    Think times and arrivals are multiplied by `pace`; 1 keeps those of the recording. By default each bundled rollout is
    replayed once, as in the demo; twice as many keep two cores busy nearly all the time.
    """

    trajectories: int = 7
    spread_s: float = 5.0
    speed: float = 2.0
    seed: int = 0
    pace: float = 1.0

    @property
    def think_divisor(self) -> float:
        """What think times are divided by in all."""
        return self.speed / self.pace

    def trace(self) -> Trace:
        """Return the trace."""
        bundled = read_trace(BUNDLED)
        kept = tuple(_on_cores(trajectory) for trajectory in bundled.trajectories)
        return tile(Trace(trajectories=kept), self.trajectories, self.spread_s * self.pace, self.seed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's words for a workload."""
    usual = Workload()
    parser.add_argument("--trajectories", type=int, default=usual.trajectories, help="rollouts at work at the same time")
    parser.add_argument("--spread", type=float, default=usual.spread_s, help="seconds over which they arrive")
    parser.add_argument("--speed", type=float, default=usual.speed, help="think times are divided by this")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the arrivals")
    parser.add_argument("--pace", type=float, help="think times and arrivals are multiplied by this (measured by bench.live)")


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the workload that `add_options` let the user choose; at pace 1 where the user named none."""
    return Workload(
        trajectories=options.trajectories,
        spread_s=options.spread,
        speed=options.speed,
        seed=options.seed,
        pace=1.0 if options.pace is None else options.pace,
    )


def words(workload: Workload) -> list[str]:
    """Return the words that lead `add_options` to this workload."""
    chosen = {
        "trajectories": workload.trajectories,
        "spread": workload.spread_s,
        "speed": workload.speed,
        "seed": workload.seed,
        "pace": workload.pace,
    }
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def _on_cores(trajectory: Trajectory) -> Trajectory:
    """Keep the actions of kind `cpu.*`; a step that loses all of them gives its think time to the next.

    Priorities are levelled: not every system has them, and one that obeys them would be judged by another's rules.
    """
    steps: list[Step] = []
    thought_s = 0.0
    for step in trajectory.steps:
        actions = tuple(action for action in step.actions if action.kind.startswith("cpu."))
        thought_s += step.think_s
        if actions:
            steps.append(replace(step, actions=actions, think_s=thought_s))
            thought_s = 0.0
    return replace(trajectory, steps=tuple(steps), priority=DEFAULT_PRIORITY)
