"""What `bench.live` replays: rollouts, without what does not run on cores.

Every system under comparison builds its trace here, so that all replay the same trajectories, arrivals and think times.

The bundled rollouts have the commands that were recorded. Commands take as long as the machine needs for them, while think times
are recorded. On a machine half as fast the same trace is twice the load, and where all cores are always busy every scheduler ends
at the same time. So think times and arrivals are stretched by the *pace*: how many times as long as recorded the commands take
here (`pace.py`). That keeps the load that was recorded.

A given trace without commands needs no pace: its actions burn as much CPU time as was recorded, on any machine
(`app/replay/burn.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from app.replay.traces import BUNDLED, read_trace
from scheduler.sim.trace import DEFAULT_PRIORITY, Step, Trace, TraceAction, Trajectory, tile
from tangram.errors import InvalidAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How much is replayed: `trajectories` of them, arriving over `spread_s` seconds; think times are divided by `speed`.

    Think times and arrivals are multiplied by `pace`; 1 keeps those of the recording. By default each bundled rollout is
    replayed once, as in the demo; twice as many keep two cores busy nearly all the time.

    Of a `file`, as many rollouts are drawn by the seed, and all seconds are multiplied by `scale`: work, think times, arrivals.
    """

    trajectories: int = 7
    spread_s: float = 5.0
    speed: float = 2.0
    seed: int = 0
    pace: float = 1.0
    file: Path | None = None
    scale: float = 1.0

    @property
    def path(self) -> Path:
        """The file that the rollouts are read from; relative paths in it start from its folder."""
        return self.file or BUNDLED

    @property
    def think_divisor(self) -> float:
        """What the think times of `trace` are divided by in all."""
        return self.speed / self.pace

    def trace(self) -> Trace:
        """Return the trace. Raises `TraceError`, and `InvalidAction` for a number of trajectories that cannot be."""
        read = (on_cores(trajectory) for trajectory in read_trace(self.path).trajectories)
        kept = tuple(_scaled(trajectory, self.scale) for trajectory in read if trajectory.steps)
        if self.file is not None and 0 < self.trajectories <= len(kept):
            kept = tuple(Random(self.seed).sample(kept, self.trajectories))
        return tile(Trace(trajectories=kept), self.trajectories, self.spread_s * self.pace * self.scale, self.seed)


OF_FILE = Workload(trajectories=24, spread_s=20.0, speed=8.0, scale=0.4)
"""What is replayed by default of a file that is given."""

_FIELDS = {"trajectories": "trajectories", "spread": "spread_s", "speed": "speed", "pace": "pace", "scale": "scale"}
"""The words of the command line without a value of their own, and the fields that they are."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command line's words for a workload."""
    usual = Workload()
    parser.add_argument("--trace", type=Path, metavar="FILE", help="recorded rollouts instead of the bundled ones")
    parser.add_argument(
        "--trajectories",
        "--take",
        type=int,
        metavar="N",
        help=f"rollouts at work at the same time; of a --trace, drawn by the seed ({usual.trajectories}; {OF_FILE.trajectories})",
    )
    parser.add_argument("--spread", type=float, help=f"seconds over which they arrive ({usual.spread_s:g}; {OF_FILE.spread_s:g})")
    parser.add_argument("--speed", type=float, help=f"think times are divided by this ({usual.speed:g}; {OF_FILE.speed:g})")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of the arrivals, and of what is drawn from a --trace")
    parser.add_argument("--scale", type=float, help=f"all seconds of a --trace are multiplied by this ({OF_FILE.scale:g})")
    parser.add_argument("--pace", type=float, help="think times and arrivals are multiplied by this (measured; 1 with --trace)")


def workload_of(options: argparse.Namespace) -> Workload:
    """Return the workload that `add_options` let the user choose; at pace 1 where the user named none."""
    usual = Workload() if options.trace is None else OF_FILE
    given = {field: value for name, field in _FIELDS.items() if (value := getattr(options, name)) is not None}
    return replace(usual, file=options.trace, seed=options.seed, **given)


def words(workload: Workload) -> list[str]:
    """Return the words that lead `add_options` to this workload."""
    chosen = {name: getattr(workload, field) for name, field in _FIELDS.items() if name != "scale" or workload.file is not None}
    chosen |= {"seed": workload.seed} if workload.file is None else {"seed": workload.seed, "trace": workload.file}
    return [word for name, value in chosen.items() for word in (f"--{name}", str(value))]


def on_cores(trajectory: Trajectory) -> Trajectory:
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


def changed(trace: Trace, change: Callable[[TraceAction], TraceAction]) -> Trace:
    """Return the trace with each action changed."""
    return replace(trace, trajectories=tuple(with_actions(trajectory, change) for trajectory in trace.trajectories))


def with_actions(trajectory: Trajectory, change: Callable[[TraceAction], TraceAction]) -> Trajectory:
    """Return the trajectory with each action changed."""
    steps = (replace(step, actions=tuple(map(change, step.actions))) for step in trajectory.steps)
    return replace(trajectory, steps=tuple(steps))


def _scaled(trajectory: Trajectory, scale: float) -> Trajectory:
    if scale != 1.0 and any(action.command for action in trajectory.actions()):
        raise InvalidAction("--scale", f"{trajectory.trajectory} runs commands, which take as long as they take: say --scale 1")
    scaled = with_actions(trajectory, lambda action: _scaled_action(action, scale))
    return replace(scaled, steps=tuple(replace(step, think_s=step.think_s * scale) for step in scaled.steps))


def _scaled_action(action: TraceAction, scale: float) -> TraceAction:
    return replace(
        action,
        work_s=action.work_s * scale,
        cpu_s=None if action.cpu_s is None else action.cpu_s * scale,
        timeout_s=None if action.timeout_s is None else action.timeout_s * scale,
    )
