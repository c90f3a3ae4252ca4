"""Memory by action on this machine, against the simulator's forecast.

    python -m bench.memory_live --trace FILE

Recorded rollouts are replayed live on one node whose memory is a small part of what their limits add up to. Their commands take and give
back the memory that the trace says. They sleep instead of computing, since cores are not what is measured, and for some seconds at most.
The same rollouts are then simulated on the same node, with the execution times of the live run, since taking memory takes time. Which
environments grow at the same time is chance. So there are several simulations, whose arrivals differ. Needs control groups that the worker
may write (`memory:enforced`).
"""

from __future__ import annotations

import argparse
import glob
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from app.replay.replay_command import ReplayOptions, replay_live, simulate
from app.replay.traces import read_trace
from bench.live_trace import with_actions
from scheduler.sim.summary import ReplayRecord
from scheduler.sim.trace import Trace, TraceAction, Trajectory
from tangram.settings import Settings

CONTAINERS = "/sys/fs/cgroup/memory/docker/memory.usage_in_bytes"
GROUPS = ("/sys/fs/cgroup/memory/**/tangram-*/memory.usage_in_bytes", "/sys/fs/cgroup/**/tangram-*/memory.current", CONTAINERS)
SAMPLE_S = 0.5
LONGEST_S = 5.0
"""Seconds of an action; some of the recorded ones wait for two minutes for their time limit."""

PAUSED_S = 0.05
"""Time without progress from which on an action counts as paused: what is shorter is how late a sample was."""


def chosen(trace: Trace, rollouts: int, limit_mb: int) -> Trace:
    """Return the first rollouts that fit into the limit, with this limit, and with actions that sleep."""
    fitting = [each for each in trace.trajectories if max(action.memory_mb or 0 for action in each.actions()) < limit_mb]
    return replace(trace, trajectories=tuple(sleeping(each, limit_mb) for each in fitting[:rollouts]))


def sleeping(trajectory: Trajectory, limit_mb: int) -> Trajectory:
    """Return a rollout with this limit, whose actions sleep."""

    def asleep(action: TraceAction) -> TraceAction:
        return replace(action, work_s=min(action.work_s, LONGEST_S), cpu_s=0.0)

    return replace(with_actions(trajectory, asleep), memory_mb=limit_mb)


def as_long_as(trace: Trace, live: ReplayRecord) -> Trace:
    """Return the rollouts with the execution times of their live run."""
    by_rollout: dict[str, list[float]] = {}
    for record in sorted(live.actions, key=lambda action: action.submitted_at):
        by_rollout.setdefault(record.trajectory, []).append(record.execution_s)

    def timed(trajectory: Trajectory) -> Trajectory:
        seconds = iter(by_rollout[trajectory.trajectory])
        return with_actions(trajectory, lambda action: replace(action, work_s=next(seconds)))

    return replace(trace, trajectories=tuple(map(timed, trace.trajectories)))


@contextmanager
def peak() -> Iterator[list[int]]:
    """Give a list whose only value is the most that a group of environments has used, in bytes."""
    most, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            for pattern in GROUPS:
                for path in glob.glob(pattern, recursive=True):
                    with suppress(OSError, ValueError):
                        most[0] = max(most[0], int(Path(path).read_text()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()


def row(name: str, record: ReplayRecord) -> str:
    """Return a line of the table."""
    paused = [action.background_s for action in record.actions if action.background_s > PAUSED_S]
    bad = sum(action.status != "succeeded" for action in record.actions)
    step_s = record.last_result_s - record.first_arrival_s
    act_s = fmean(action.act_s for action in record.actions)
    return f"| {name} | {len(record.actions)} | {bad} | {step_s:.1f} | {act_s:.2f} | {len(paused)} | {sum(paused):.1f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, required=True, help="recorded rollouts that say the memory of their actions")
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--limit-mb", type=int, default=1_024, help="limit of each environment")
    parser.add_argument("--memory-mb", type=int, default=2_048, help="memory of the node")
    parser.add_argument("--speed", type=float, default=60.0, help="think times are divided by this")
    parser.add_argument("--image", help="containers of this image, which has python3, instead of processes")
    parser.add_argument("--seeds", type=int, default=8, help="simulations")
    given = parser.parse_args()
    trace = chosen(read_trace(given.trace), given.rollouts, given.limit_mb)
    options = ReplayOptions(cores=64, memory_mb=given.memory_mb, speed=given.speed, tile=len(trace.trajectories), spread_s=10.0)
    os.environ |= {"TANGRAM_MEMORY": "elastic", **({"TANGRAM_SANDBOX": "docker", "TANGRAM_IMAGE": given.image} if given.image else {})}
    with tempfile.TemporaryDirectory() as folder, peak() as most:
        settings = Settings(state_dir=Path(folder))
        live = replay_live(trace, given.trace, options, settings, lambda count: lambda: None, print).record
    limits_mb = len(trace.trajectories) * given.limit_mb
    print(f"limits: {limits_mb:,} MB; node: {given.memory_mb:,} MB; most in use: {most[0] >> 20:,} MB")
    print("| | actions | not succeeded | step s | mean ACT s | paused | for s |\n|---|---:|---:|---:|---:|---:|---:|")
    print(row("live", live))
    timed, overhead_s = as_long_as(trace, live), fmean(action.overhead_s for action in live.actions)
    for seed in range(given.seeds):
        print(row(f"simulated, seed {seed}", simulate(timed, replace(options, overhead_s=overhead_s, seed=seed))))


if __name__ == "__main__":
    main()
