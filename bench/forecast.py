"""Recorded rollouts live on this machine, against the simulator's forecast of them.

    python -m bench.forecast --trace FILE [--slept --cores 16 --trajectories 64]

By default each command burns its recorded CPU time on the cores of this machine, and sleeps for the rest of its duration. With `--slept`
all commands sleep, so any number of cores can be declared.

A trace says what commands take. It says nothing of what it costs to start them, and of the CPU time of our own processes, which on one
machine share its cores. So the forecast is told two figures of the live run:

| figure                                                                               | in the forecast                     |
|--------------------------------------------------------------------------------------|-------------------------------------|
| the mean overhead of an action                                                       | `--overhead` of `tangram replay`    |
| the CPU time of the whole machine less what was recorded, for each action (`dearer`) | more work, and CPU time, of each    |

Queueing, background, execution, mean ACT and the step follow from the simulator alone. The machine has to be quiet: whatever else
computes is taken for ours. The exit code is 0 if mean ACT and step are within `WITHIN` of the forecast.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from functools import partial
from math import fsum
from pathlib import Path

from app.local.stack import cores_here
from app.replay.replay_command import ReplayOptions, alone, replay_live, simulate
from bench.live_record import MachineMeter, metered
from bench.live_trace import add_options, changed, workload_of
from scheduler.sim.summary import summarise
from scheduler.sim.trace import TraceAction
from tangram.elasticity import Elasticity
from tangram.errors import TangramError
from tangram.settings import Settings

WITHIN = 0.05
LEAST_S = 1e-3
"""Below so many seconds a ratio says nothing."""
JUDGED = ("mean_act", "step_duration")
SHOWN = ("mean_act", "mean_queue", "mean_background", "mean_overhead", "mean_execution", "p50_act", "p95_act", "step_duration")


def main() -> int:
    """Replay, simulate, print, and return 0 if the forecast is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=cores_here(), help="cores that are declared")
    parser.add_argument("--slept", action="store_true", help="let all commands sleep")
    add_options(parser)
    given = parser.parse_args()
    if given.trace is None:
        parser.error("--trace is needed: the bundled rollouts say nothing of CPU time")
    try:
        workload = workload_of(given)
        trace = changed(workload.trace(), slept) if given.slept else workload.trace()
        options = ReplayOptions(cores=given.cores, gpus=0, speed=workload.think_divisor)
        meters: list[MachineMeter] = []
        with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
            live = replay_live(trace, workload.path, options, alone(Settings(), Path(folder)), metered(meters), print).document
    except TangramError as error:
        print(f"bench.forecast: {error}", file=sys.stderr)
        return 2
    actions = list(trace.actions())
    own_s = (meters[-1].used_s - fsum(action.work_s if action.cpu_s is None else action.cpu_s for action in actions)) / len(actions)
    told = replace(options, overhead_s=live["mean_overhead"])
    columns = [live, summarise(simulate(changed(trace, partial(dearer, own_s=own_s)), told)), summarise(simulate(trace, options))]
    print(f"{len(actions)} actions, {live['failed']} failed; CPU time besides what was recorded: {own_s * 1e3:.1f} ms for each")
    print("| s | live | forecast | live ÷ forecast | trace alone |\n|---|---:|---:|---:|---:|")
    for key in SHOWN:
        seen, expected, bare = (float(column[key]) for column in columns)
        ratio = f"{seen / expected:.3f}" if expected >= LEAST_S else "–"
        print(f"| {key} | {seen:.3f} | {expected:.3f} | {ratio} | {bare:.3f} |")
    is_right = not live["failed"] and all(abs(live[key] / columns[1][key] - 1) <= WITHIN for key in JUDGED)
    print(f"the forecast is {'' if is_right else 'not '}right to within {WITHIN:.0%}")
    return 0 if is_right else 1


def slept(action: TraceAction) -> TraceAction:
    """Return the action with a command that sleeps for as long, however many cores it has."""
    return replace(action, command=f"sleep {action.work_s:.6f}", cpu_s=0.0, elasticity=Elasticity())


def dearer(action: TraceAction, own_s: float) -> TraceAction:
    """Return the action with so many core-seconds more of work."""
    return replace(action, work_s=action.work_s + own_s, cpu_s=None if action.cpu_s is None else action.cpu_s + own_s)


if __name__ == "__main__":
    sys.exit(main())
