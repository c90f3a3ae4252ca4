"""What a job that floods the system does to the others, simulated: `python -m bench.flood`, in about two minutes.

Three jobs with equal shares run AI-coding rollouts (`bench.workloads`). Then the third one has many times as many of them,
and nothing else changes. Printed is the mean ACT of the lightest job in seconds, calm and in the flood, and what the flood
multiplies it by; as a Markdown table for docs/scheduling.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.workloads import ai_coding
from scheduler.policies import make_policy
from scheduler.sim.cluster import Cluster
from scheduler.sim.simulate import Simulation
from scheduler.sim.summary import summarise
from scheduler.sim.trace import Trace, Trajectory

LIGHTEST = "light"


@dataclass(frozen=True, slots=True)
class Case:
    """Machines, the rollouts of the three jobs, and those of the third in the flood."""

    nodes: int
    cores: int
    rollouts: tuple[int, int, int]
    flood: int
    seed: int


CASES = (
    Case(1, 224, (32, 64, 128), 1280, 1),
    Case(1, 112, (32, 64, 128), 640, 2),
    Case(4, 64, (32, 64, 128), 1280, 4),
    Case(1, 128, (16, 32, 64), 640, 7),
    Case(2, 64, (16, 48, 64), 640, 9),
    Case(8, 32, (32, 64, 128), 1280, 11),
    Case(1, 128, (32, 32, 32), 640, 8),
    Case(1, 64, (16, 32, 32), 320, 3),
)


def coding(job: str, count: int, seed: int) -> tuple[Trajectory, ...]:
    """Return AI-coding rollouts as those of a job."""
    trace = ai_coding(count, seed)
    return tuple(replace(rollout, job=job, trajectory=f"{job}-{rollout.trajectory}") for rollout in trace.trajectories)


def three_jobs(case: Case, third: int) -> Trace:
    """Return the rollouts of all jobs where the third one has `third` of them."""
    light, middle, _ = case.rollouts
    jobs = coding(LIGHTEST, light, case.seed) + coding("middle", middle, case.seed + 100) + coding("third", third, case.seed + 200)
    return Trace(trajectories=jobs)


def lightest_act_s(case: Case, third: int, policy: str = "elastic", without: tuple[str, ...] = ()) -> float:
    """Return the mean ACT of the lightest job in seconds where the third one has `third` rollouts."""
    cluster = Cluster(nodes=case.nodes, cores=case.cores)
    run = Simulation(three_jobs(case, third), make_policy(policy, without=without), cluster).run()
    return float(summarise(run)["by_job"][LIGHTEST]["mean_act"])


def main() -> None:
    """Print the table."""
    print("| nodes × cores | rollouts | flood | calm | flood | × | without `shares` | × | `paper` | × |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for case in CASES:
        row = f"| {case.nodes} × {case.cores} | {', '.join(map(str, case.rollouts))} | {case.flood} "
        for number, (policy, without) in enumerate((("elastic", ()), ("elastic", ("shares",)), ("paper", ()))):
            calm, flood = (lightest_act_s(case, third, policy, without) for third in (case.rollouts[2], case.flood))
            row += f"| {calm:.2f} " if number == 0 else ""
            row += f"| {flood:.2f} | {flood / calm:.2f} "
        print(row + "|", flush=True)


if __name__ == "__main__":
    main()
