"""The result of a run: one record per action, and the figures over all actions.

The same record and the same arithmetic serve the simulator and the live replay, so that their figures can be
compared. Seconds throughout, microseconds where the name says `us`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

from scheduler.learning.durations import PredictionError
from scheduler.model.stats import summary


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """One action of a replay, with its end and its times.

    `floor_s` is its duration on its best units with no queue; `units` is its last number of granted units. `unit_seconds` are its
    units times the seconds it held them while it ran. `task_id` is its Celery task, in live runs only.
    """

    id: str
    job: str
    trajectory: str
    kind: str
    status: str
    submitted_at: float
    ended_at: float
    floor_s: float
    queue_s: float = 0.0
    background_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0
    units: int = 0
    unit_seconds: float = 0.0
    cpu_s: float = 0.0
    reason: str = ""
    task_id: str = ""

    @property
    def act_s(self) -> float:
        """Submission to result."""
        return self.queue_s + self.background_s + self.overhead_s + self.execution_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The cores and GPU cells of all nodes in a run."""

    cores: int
    cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """An environment on a node; `trajectory` is the place of its trajectory in the trace."""

    trajectory: int
    node: str
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """The memory of a simulated run.

    `peak_booked_mb` is the most that was booked on one node. Environments asked for memory `asks` times; actions paused for want of it
    `pauses` times, for `paused_s` seconds by action.
    """

    peak_booked_mb: int
    asks: int
    pauses: int
    paused_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRecord:
    """A whole replay, live or simulated.

    `decision_us` holds the duration of each scheduling decision, in order. `cores_granted` holds pairs of a time and the cores
    granted from then on. `stays` holds the environments. Both exist for simulated runs only.
    """

    policy: str
    trajectories: int
    actions: Sequence[ActionRecord]
    first_arrival_s: float
    last_result_s: float
    capacity: Capacity
    resizes: int = 0
    restores: int = 0
    decisions: int = 0
    decision_us: Sequence[float] = field(default_factory=tuple)
    cores_granted: Sequence[tuple[float, float]] = field(default_factory=tuple)
    stays: Sequence[Stay] = field(default_factory=tuple)
    prediction: PredictionError | None = None
    memory: MemoryFigures | None = None


def act_figures(records: Sequence[ActionRecord]) -> dict[str, float]:
    """Return the ACT keys over some actions; zeros without actions."""
    spread = summary(record.act_s for record in records)
    count = max(1, len(records))
    mean_queue = fsum(record.queue_s for record in records) / count
    mean_background = fsum(record.background_s for record in records) / count
    mean_execution = fsum(record.execution_s for record in records) / count
    mean_overhead = fsum(record.overhead_s for record in records) / count
    return {
        "mean_act": mean_queue + mean_background + mean_execution + mean_overhead,
        "p50_act": spread.p50,
        "p95_act": spread.p95,
        "p99_act": spread.p99,
        "mean_queue": mean_queue,
        "mean_background": mean_background,
        "mean_execution": mean_execution,
        "mean_overhead": mean_overhead,
    }


def summarise(run: ReplayRecord) -> dict[str, Any]:
    """Return the JSON document of a replay, with the keys that the command line promises."""
    records = run.actions
    duration_s = max(0.0, run.last_result_s - run.first_arrival_s)
    decision_us = summary(run.decision_us)
    return {
        "policy": run.policy,
        "trajectories": run.trajectories,
        "actions": len(records),
        "failed": sum(record.status != "succeeded" for record in records),
        **act_figures(records),
        "floor_act": fsum(record.floor_s for record in records) / max(1, len(records)),
        "step_duration": duration_s,
        "cpu_utilisation": _utilisation(records, "cpu.", run.capacity.cores * duration_s),
        "gpu_utilisation": _utilisation(records, "gpu.", run.capacity.cells * duration_s),
        "resizes": run.resizes,
        "restores": run.restores,
        "decisions": run.decisions,
        "decision_us_p50": decision_us.p50,
        "decision_us_p99": decision_us.p99,
        **_prediction(run.prediction),
        **_memory(run.memory),
        "by_kind": _by(records, "kind"),
        "by_job": _by(records, "job"),
    }


def _prediction(error: PredictionError | None) -> dict[str, float]:
    """Return the factors within which half, and nine in ten, of the expected durations were right; empty if unknown."""
    if error is None or not error.predictions:
        return {}
    return {"prediction_factor_p50": error.factor_p50, "prediction_factor_p90": error.factor_p90}


def _memory(figures: MemoryFigures | None) -> dict[str, float]:
    """Return what was booked at most on a node, and how often and how long actions paused for memory; empty if unknown."""
    if figures is None:
        return {}
    return {
        "memory_mb_peak_booked": figures.peak_booked_mb,
        "memory_asks": figures.asks,
        "pauses": figures.pauses,
        "paused_s": fsum(figures.paused_s.values()) / max(1, len(figures.paused_s)),
    }


def _utilisation(records: Sequence[ActionRecord], prefix: str, offered_s: float) -> float:
    """Return the share of the offered unit-seconds in which an action ran."""
    used = sum(record.unit_seconds for record in records if record.kind.startswith(prefix))
    return used / offered_s if offered_s > 0 else 0.0


def _by(records: Sequence[ActionRecord], name: str) -> dict[str, dict[str, float]]:
    groups: dict[str, list[ActionRecord]] = {}
    for record in records:
        groups.setdefault(getattr(record, name), []).append(record)
    return {key: {"actions": len(groups[key]), **act_figures(groups[key])} for key in sorted(groups)}
