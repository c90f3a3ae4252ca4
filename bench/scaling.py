"""How the cost of a decision grows: simulated steps of growing size, in one run.

`python -m bench.scaling [--most N] [--json]` replays the AI-coding workload of `bench.workloads` under `elastic` twice over:
with more and more trajectories on the same 15 nodes of 256 cores, and with as many cores as trajectories on more and more
nodes, up to 391 of them (100,096 cores). What is timed is the replay itself; making the trace is not. Decision times are
the wall time of `Core.handle` for the events at which something was decided.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass

from bench.workloads import ai_coding
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.summary import summarise

CORES = 256
SAME_CLUSTER = ((640, 15), (1280, 15), (2560, 15), (5120, 15), (10240, 15))
MORE_NODES = ((1280, 5), (3840, 15), (15360, 60), (25600, 100))
LARGEST = (10240, 391)
"""A hundred thousand cores, a tenth of a trajectory each: what more nodes alone cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One replay: its size, what it took, and what it came to."""

    trajectories: int
    nodes: int
    cores: int
    actions: int
    wall_s: float
    us_per_action: float
    decision_us_p50: float
    decision_us_p99: float
    resizes: int
    act_over_floor: float
    memory_mb: float


def measure(trajectories: int, nodes: int, seed: int) -> Row:
    """Replay once."""
    trace = ai_coding(trajectories, seed)
    gc.collect()
    began = time.perf_counter()
    run = Simulation(trace, make_policy("elastic"), Cluster(nodes=nodes, cores=CORES)).run()
    wall_s = time.perf_counter() - began
    figures = summarise(run)
    return Row(
        trajectories=trajectories,
        nodes=nodes,
        cores=nodes * CORES,
        wall_s=wall_s,
        us_per_action=1e6 * wall_s / figures["actions"],
        **{name: figures[name] for name in ("actions", "decision_us_p50", "decision_us_p99", "resizes")},
        act_over_floor=figures["mean_act"] / figures["floor_act"],
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


HEAD = (
    "| trajectories | nodes × cores | actions | wall, s | µs per action | decision p50, µs | p99, µs | resizes "
    "| mean ACT ÷ floor | memory, MB |\n"
    "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def line(row: Row) -> str:
    """Return a row of the Markdown table."""
    return (
        f"| {row.trajectories} | {row.nodes} × {CORES} | {row.actions} | {row.wall_s:.1f} | {row.us_per_action:.0f} | "
        f"{row.decision_us_p50:.0f} | {row.decision_us_p99:.0f} | {row.resizes} | {row.act_over_floor:.3f} | {row.memory_mb:.0f} |"
    )


def main() -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=25_600, help="leave out replays with more trajectories")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    series = {"the same 15 nodes": SAME_CLUSTER, "as many cores as trajectories": MORE_NODES, "a hundred thousand cores": (LARGEST,)}
    measured: dict[str, list[Row]] = {}
    for name, sizes in series.items():
        measured[name] = []
        if not options.json:
            print(f"\n{name}\n\n{HEAD}", flush=True)
        for trajectories, nodes in sizes:
            if trajectories > options.most:
                continue
            row = measure(trajectories, nodes, options.seed)
            measured[name].append(row)
            print(line(row), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps({name: [asdict(row) for row in rows] for name, rows in measured.items()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
