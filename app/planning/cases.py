"""One simulation of a plan: what is simulated, and what of its outcome a plan needs.

What may live here: values that travel between processes, and pure functions on them. Who runs them is `pool.py`, which are run
`search.py` and `planner.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import fsum

from app.replay.replay_command import ReplayOptions, simulate
from scheduler.model import QuotaSpec
from scheduler.sim.summary import ReplayRecord, act_figures
from scheduler.sim.trace import Trace, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation: the words of a replay, and by account the part of its declared rate that it has."""

    options: ReplayOptions
    rates: tuple[tuple[str, float], ...] = ()

    @property
    def cores(self) -> int:
        """The cores of all nodes."""
        return self.options.nodes * (self.options.cores or 0)

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes."""
        return self.options.nodes * (self.options.gpus or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case. Seconds; `peak_cells` are the most cells in use at a time, `cpu_s` what the simulation itself cost.

    `limits_mb` is the most that the limits of one node's environments added up to at a time, `booked_mb` the most that was booked there.
    """

    mean_act: float
    p95_act: float
    step_duration: float
    failed: int
    mean_cores: float
    peak_cells: int
    limits_mb: int
    booked_mb: int
    cpu_s: float


def run_case(trace: Trace, case: Case) -> Outcome:
    """Simulate a case of a trace."""
    began = time.process_time()
    trace = with_rates(trace, dict(case.rates))
    record = simulate(trace, case.options)
    figures = act_figures(record.actions)
    step_s = record.last_result_s - record.first_arrival_s
    return Outcome(
        mean_act=figures["mean_act"],
        p95_act=figures["p95_act"],
        step_duration=step_s,
        failed=sum(action.status != "succeeded" for action in record.actions),
        mean_cores=_mean_cores(record, step_s),
        peak_cells=_peak_cells(record),
        limits_mb=_limits_mb(record, case.options.prepare(trace)),
        booked_mb=record.memory.peak_booked_mb if record.memory is not None else 0,
        cpu_s=time.process_time() - began,
    )


def with_limits(trace: Trace) -> Trace:
    """Return the trace with a limit for each environment: what its trajectory declares, else the most that an action was recorded with."""
    return replace(trace, trajectories=tuple(replace(each, memory_mb=_limit_mb(each)) for each in trace.trajectories))


def _limit_mb(trajectory: Trajectory) -> int | None:
    recorded = (action.memory_mb or 0 for action in trajectory.actions() if action.kind.startswith("cpu."))
    return trajectory.memory_mb or max(recorded, default=0) or None


def account_of(quota: QuotaSpec) -> str:
    """Return the account that a quota shares its limits with, which is its own where it names none."""
    return quota.account or quota.name


def with_rates(trace: Trace, rates: Mapping[str, float]) -> Trace:
    """Return a trace in which the accounts named have that part of their declared rate."""
    if not rates:
        return trace
    quotas = {name: _slowed(quota, rates.get(account_of(quota), 1.0)) for name, quota in trace.quotas.items()}
    return replace(trace, quotas=quotas)


def _slowed(quota: QuotaSpec, factor: float) -> QuotaSpec:
    return quota if quota.rate_per_s is None else replace(quota, rate_per_s=quota.rate_per_s * factor)


def _mean_cores(record: ReplayRecord, step_s: float) -> float:
    if not record.cores_granted or step_s <= 0:
        return 0.0
    until = [at for at, _ in record.cores_granted[1:]] + [record.last_result_s]
    return fsum(cores * max(0.0, end - at) for (at, cores), end in zip(record.cores_granted, until, strict=True)) / step_s


def _peak_cells(record: ReplayRecord) -> int:
    changes = []
    for action in record.actions:
        if action.kind.startswith("gpu."):
            changes += [(action.ended_at - action.execution_s - action.overhead_s, action.units), (action.ended_at, -action.units)]
    return _peak(changes)


def _limits_mb(record: ReplayRecord, trace: Trace) -> int:
    by_node: dict[str, list[tuple[float, int]]] = {}
    for stay in record.stays:
        memory_mb = trace.trajectories[stay.trajectory].memory_mb or 0
        by_node.setdefault(stay.node, []).extend([(stay.from_s, memory_mb), (stay.until_s, -memory_mb)])
    return max((_peak(changes) for changes in by_node.values()), default=0)


def _peak(changes: Iterable[tuple[float, int]]) -> int:
    """Return the largest sum of changes so far; what is given back at a time may be taken at that time."""
    most = held = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return most
