"""Recording a scripted rollout: every action is carried out once, on its least units, and timed.

What may live here: how a script becomes a trajectory with times, and what an executor must be able to do for that.
One executor is in `record_command.py`, bound to the client; `examples/subprocess_executor.py` records without a running system.

The actions of one step are carried out one after another, so that none is timed while another takes its cores. Think
times are not waited for: they are data of the script.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from app.replay.scripts import Script, action_text, starting_files
from app.replay.trace_lines import TraceError
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.action import command_class
from tangram.errors import TangramError

DEFAULT_TIMEOUT_S = 120.0
_DIGITS = 4


class RecordError(TangramError, RuntimeError):
    """Raised when a script does not run as it says; one line names the script and the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one action: seconds of execution, core-seconds used (`None`: not known), exit code, the end of the output."""

    execution_s: float
    cpu_s: float | None = None
    exit_code: int = 0
    output: str = ""


class Executor(Protocol):
    """One environment, and the services and APIs around it."""

    def upload(self, path: str, content: bytes) -> None:
        """Put a starting file at `path`, relative to the folder that commands run in. Not timed."""

    def exec(self, command: str, *, units: int, timeout_s: float) -> Outcome:
        """Run a shell command on `units` cores, told to it in `TANGRAM_DOP`."""

    def read_file(self, path: str) -> Outcome:
        """Read the file at `path`."""

    def write_file(self, path: str, content: bytes) -> Outcome:
        """Write the file at `path`, with its folders."""

    def outside(self, action: TraceAction) -> Outcome | None:
        """Carry out a gpu or api action on its least units; `None` where that cannot be done here."""


def record(script: Script, executor: Executor, relative_to: Path, on_step: Callable[[Step], None] | None = None) -> Trajectory:
    """Carry out `script` and give its trajectory with the times measured.

    `work_s` is what the action would take on one unit, `observed_s` what it took, `cpu_s` the core-seconds it used. An
    action that `executor` cannot carry out keeps the `work_s` of the script. The trajectory's key `files` names the
    starting files, relative to `relative_to`, the folder that the trace will be in. Raises `RecordError` when a command ends with another
    exit code than the script expects; `TraceError` when the starting files cannot be read.
    """
    if script.files is not None:
        for path, content in starting_files(script.files):
            executor.upload(path, content)
    steps = []
    for index, step in enumerate(script.trajectory.steps):
        actions = tuple(_record_action(action, executor, f"{script.path}: steps[{index}]") for action in step.actions)
        steps.append(replace(step, actions=actions))
        if on_step is not None:
            on_step(steps[-1])
    extra = dict(script.trajectory.extra)
    if script.files is not None:
        extra["files"] = Path(os.path.relpath(script.files.resolve(), relative_to.resolve())).as_posix()
    return replace(script.trajectory, steps=tuple(steps), extra=extra)


def record_trace(
    scripts: Sequence[Script],
    open_executor: Callable[[Script], AbstractContextManager[Executor]],
    relative_to: Path,
    on_step: Callable[[Step], None] | None = None,
) -> Trace:
    """Record `scripts` one after another, each with an executor of its own, as one trace with all their services and quotas."""
    header = shared_header(scripts)
    trajectories: list[Trajectory] = []
    for script in scripts:
        if any((each.job, each.trajectory) == (script.trajectory.job, script.trajectory.trajectory) for each in trajectories):
            raise TraceError(f"another script has the name {script.trajectory.trajectory!r}", key="trajectory", file=str(script.path))
        with open_executor(script) as executor:
            trajectories.append(record(script, executor, relative_to, on_step))
    return replace(header, trajectories=tuple(trajectories))


def shared_header(scripts: Iterable[Script]) -> Trace:
    """Return the services and quotas of all scripts. Raises `TraceError` where two describe one otherwise."""
    found: dict[str, dict[str, Any]] = {"services": {}, "quotas": {}}
    for script in scripts:
        for key, known in found.items():
            for name, described in getattr(script.header, key).items():
                if known.setdefault(name, described) != described:
                    raise TraceError(f"{name!r} is described otherwise by another script", key=key, file=str(script.path))
    return Trace(trajectories=(), **found)


def _record_action(action: TraceAction, executor: Executor, where: str) -> TraceAction:
    outcome = _carry_out(action, executor)
    if outcome is None:
        return action
    expected = action.extra.get("exit_code", 0)
    if outcome.exit_code != expected:
        last = outcome.output.strip().splitlines()[-1:] or ["no output"]
        raise RecordError(f"{where}: {action.kind} ended with exit code {outcome.exit_code}, not {expected}: {last[0][:200]}")
    least = action.elasticity.units[0]
    return replace(
        action,
        work_s=round(outcome.execution_s * action.elasticity.curve.speedup(least), _DIGITS),
        observed_s=round(outcome.execution_s, _DIGITS),
        cpu_s=None if outcome.cpu_s is None else round(outcome.cpu_s, _DIGITS),
        action_class=action.action_class or (command_class(action.command) if action.command else None),
    )


def _carry_out(action: TraceAction, executor: Executor) -> Outcome | None:
    if action.kind == "cpu.exec":
        timeout_s = DEFAULT_TIMEOUT_S if action.timeout_s is None else action.timeout_s
        return executor.exec(action.command or "", units=action.elasticity.units[0], timeout_s=timeout_s)
    if action.kind == "cpu.read_file":
        return executor.read_file(action_text(action, "path"))
    if action.kind == "cpu.write_file":
        return executor.write_file(action_text(action, "path"), action_text(action, "text").encode())
    return executor.outside(action)
