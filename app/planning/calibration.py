"""How far simulations are from live runs of this machine: `tangram plan --calibrate`.

The bundled rollouts, or those of a trace, are replayed live, on a stack of their own, under each policy. What every action took becomes a
trace (`recorded`), and that is simulated under the same policy on as many cores and GPUs. Nothing else differs, so the error is the
simulator's: what it leaves out of queueing and overhead. How well a trace foretells durations is another question, which this does not
answer.

One thing is taken from the trace, not from the live run: the part of its time in which a command needs its core. Where other
programs take the core, a command gets less of it, which in a recording looks as if it had waited for something else.

The result is written to the state folder, where `tangram plan` finds it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.local.processes import busy_elsewhere_s
from app.local.stack import cores_here
from app.replay.replay_command import Progress, ReplayOptions, alone, replay_live, simulate
from app.replay.trace_lines import first_problem, unreadable
from app.replay.traces import read_trace
from scheduler.learning.durations import speed_on
from scheduler.sim.summary import ActionRecord, ReplayRecord, summarise
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.errors import TangramError
from tangram.settings import Settings

FILE = "calibration.json"
POLICIES = ("static:1", "elastic")
SPEED = 4.0
GPUS = 2
KEYS = ("mean_act", "p95_act", "step_duration")
FIGURES = (*KEYS, "mean_queue", "mean_background", "mean_execution", "mean_overhead")


class _Figures(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    mean_act: float
    step_duration: float


class _OfPolicy(BaseModel):
    model_config = ConfigDict(extra="allow")
    error: _Figures
    overhead_s: float
    with_overhead: _Figures


class _Calibration(BaseModel):
    model_config = ConfigDict(extra="allow")
    at: Annotated[float, Field(ge=0, le=1e11)]
    others_cores: float
    cores: int
    policies: dict[str, _OfPolicy]


def calibrate(rollouts: Path, settings: Settings, progress: Progress, say: Callable[[str], None]) -> dict[str, Any]:
    """Run and simulate the trace `rollouts`, and return the document, which is also written to the state folder."""
    trace = read_trace(rollouts)
    found = {}
    began, used_before = time.monotonic(), busy_elsewhere_s()
    for policy in POLICIES:
        say(f"replaying {len(trace.trajectories)} recorded rollouts live under {policy} …")
        # Nothing of a surrounding deployment is used: its load would be measured, too.
        folder = settings.state_dir.absolute() / "calibration" / policy.replace(":", "-")
        own = alone(settings, folder).model_copy(update={"services_file": None})
        options = ReplayOptions(policy=policy, speed=SPEED, gpus=GPUS)
        with progress(policy) as begin:
            live = replay_live(trace, rollouts, options, own, begin, say)
        if live.document["failed"]:
            raise TangramError(
                f"{live.document['failed']} actions failed under {policy}: nothing can be said of the simulator; see {folder}"
            )
        found[policy] = compared(trace, live.record, options)
    path = settings.state_dir.absolute() / FILE
    others = (busy_elsewhere_s() - used_before) / (time.monotonic() - began)
    document = {
        "at": time.time(), "cores": cores_here(), "others_cores": others, "speed": SPEED, "policies": found, "file": str(path)
    }  # fmt: skip
    written = path.with_suffix(".part")
    written.write_text(json.dumps(document, indent=2), encoding="utf-8")
    written.replace(path)
    return document


def compared(trace: Trace, live: ReplayRecord, options: ReplayOptions) -> dict[str, Any]:
    """Return the figures of a live run, those of its simulation, and the error of the latter as a part of the former.

    `overhead_s` is the mean overhead of the live actions that take no cells, and `with_overhead` the error of a simulation with that much.
    """
    trace, options = recorded(trace, live), replace(options, cores=live.capacity.cores)
    overhead_s = fmean([record.overhead_s for record in live.actions if not record.kind.startswith("gpu.")] or [0.0])
    lived, without = summarise(live), summarise(simulate(trace, options))
    counted = summarise(simulate(trace, replace(options, overhead_s=max(0.0, overhead_s))))
    return {
        "live": {key: lived[key] for key in FIGURES},
        "simulated": {key: without[key] for key in FIGURES},
        "error": {key: without[key] / lived[key] - 1 for key in KEYS},
        "overhead_s": overhead_s,
        "with_overhead": {key: counted[key] / lived[key] - 1 for key in KEYS},
    }


def recorded(trace: Trace, live: ReplayRecord) -> Trace:
    """Return a trace with the durations that a live run of it had, as they would be on one unit."""
    by_id = {record.id: record for record in live.actions}
    trajectories = [_recorded_trajectory(number, trajectory, by_id) for number, trajectory in enumerate(trace.trajectories)]
    return replace(trace, trajectories=tuple(trajectories))


def _recorded_trajectory(number: int, trajectory: Trajectory, by_id: Mapping[str, ActionRecord]) -> Trajectory:
    steps: list[Step] = []
    for index, step in enumerate(trajectory.steps):
        actions = [_recorded_action(action, by_id[f"{number}.{index}.{place}"]) for place, action in enumerate(step.actions)]
        steps.append(replace(step, actions=tuple(actions)))
    return replace(trajectory, steps=tuple(steps))


def _recorded_action(action: TraceAction, record: ActionRecord) -> TraceAction:
    work_s = record.execution_s * speed_on(action.elasticity.curve, max(1, record.units))
    # The trace says for which part of its time a command needs a core. The live run cannot say it: other programs take cores from
    # the command.
    return replace(action, work_s=work_s, cpu_s=action.busy * work_s, observed_s=record.execution_s)


def read_calibration(state_dir: Path) -> dict[str, Any] | None:
    """Return the last calibration of this state folder; None where there was none. Raises `TraceError` where it cannot be understood."""
    path = state_dir / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unreadable(error, str(path)) from None
    try:
        return _Calibration.model_validate_json(text).model_dump()
    except ValidationError as error:
        raise first_problem(error).at(str(path)) from None
