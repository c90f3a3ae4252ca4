"""What memory by action is worth: recorded rollouts that reserve their limit, against rollouts that are granted memory as they use it.

    python -m bench.memory --trace FILE

The trace must say the memory of its actions (`memory_mb`, `resident_mb`). Each trajectory gets a limit with which all of them can end.
Simulated in virtual time: 256 rollouts on 64 cores, think times divided by 4, the median of three seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from app.replay.replay_command import ReplayOptions, simulate
from bench.shortage_cases import HALVES, Recording
from scheduler.model import UNLIMITED
from scheduler.sim.summary import act_figures
from scheduler.sim.trace import Trace

LIMIT_MB = 2_100
SIZES_MB = (32_000, 48_000, 60_000)
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Seconds; `wait_s` is the mean wait of a rollout for its environment, which counts for its first action."""

    step_s: float
    mean_act_s: float
    wait_s: float
    bad: int
    pauses: int
    booked_mb: int


def limited(trace: Trace, limit_mb: int) -> Trace:
    """Return a trace whose trajectories have this limit of memory."""
    return replace(trace, trajectories=tuple(replace(each, memory_mb=limit_mb) for each in trace.trajectories))


def run(trace: Trace, memory_mb: int, seed: int, without: tuple[str, ...]) -> Row:
    """Simulate one case. The mean ACT leaves the waits for environments out."""
    options = ReplayOptions(cores=64, memory_mb=memory_mb, seed=seed, speed=4.0, tile=256, spread_s=60.0, without=without)
    record = simulate(trace, options)
    memory = record.memory
    assert memory is not None, "simulated"
    act_s = act_figures(record.actions)["mean_act"]
    waits_s = sum(stay.from_s for stay in record.stays) - sum(each.arrival_s for each in options.prepare(trace).trajectories)
    return Row(
        step_s=record.last_result_s - record.first_arrival_s,
        mean_act_s=act_s - waits_s / max(1, len(record.actions)),
        wait_s=waits_s / record.trajectories,
        bad=sum(action.status != "succeeded" for action in record.actions),
        pauses=memory.pauses,
        booked_mb=memory.peak_booked_mb,
    )


def line(memory_mb: int, name: str, rows: Sequence[Row]) -> str:
    """Return a line of the table: medians of the seeds."""
    size = "unlimited" if memory_mb == UNLIMITED else f"{memory_mb:,}"
    middle = [median(getattr(row, key) for row in rows) for key in ("step_s", "mean_act_s", "wait_s", "pauses", "booked_mb")]
    bad = sum(row.bad for row in rows)
    return f"| {size} | {name} | {middle[0]:,.0f} | {middle[1]:.2f} | {middle[2]:.1f} | {middle[3]:.0f} | {middle[4]:,.0f} | {bad} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, required=True, help="recorded rollouts that say the memory of their actions")
    parser.add_argument("--half", choices=HALVES, default="all", help="every second rollout only, beginning with the first or the second")
    parser.add_argument("--limit-mb", type=int, default=LIMIT_MB, help="limit of each environment")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    given = parser.parse_args()
    trace = limited(Recording(given.trace, given.half).read(), given.limit_mb)
    print("| memory MB | booked | step s | mean ACT s, environment there | wait for it s | pauses | most booked MB | not succeeded |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for memory_mb in (*SIZES_MB, UNLIMITED):
        for name, without in (("by limit", ("memory",)), ("by action", ())):
            print(line(memory_mb, name, [run(trace, memory_mb, seed, without) for seed in given.seeds]), flush=True)


if __name__ == "__main__":
    main()
