"""SWE-agent's `.traj` files as a trace: one trajectory a file, one `cpu.exec` a step.

A `.traj` file is one JSON object; its list `trajectory` holds the steps. Of a step are used:

| key              | becomes                                                                              |
|------------------|--------------------------------------------------------------------------------------|
| `action`         | `command`, and by its first word `class`; a step without one ran nothing: left out   |
| `execution_time` | `work_s` and `observed_s`: SWE-agent ran the command on whatever cores there were    |

The files do not record how long the model thought, so `think_s` is 0 throughout. The commands are of SWE-agent's
own tools where the agent used those (`edit`, `open`); outside of its containers they are timings, not programs.
The trajectory is called after its file, its job is `swe-agent`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from app.replay.trace_lines import AnyLine, Seconds, TraceError, unreadable, validated
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.action import command_class

JOB = "swe-agent"
SUFFIX = ".traj"
LONGEST_NAME = 200


class _StepOfFile(AnyLine):
    model_config = ConfigDict(extra="ignore")
    action: Annotated[str, Field(pattern=r"^[^\x00]*$")] | None = None
    execution_time: Seconds | None = None


class _File(AnyLine):
    model_config = ConfigDict(extra="ignore")
    trajectory: Annotated[tuple[_StepOfFile, ...], Field(min_length=1)]


def import_swe_agent(paths: Iterable[str | Path]) -> Trace:
    """Read `.traj` files, in the order given, as one trace.

    Raises `TraceError` when a file cannot be read, is no `.traj` file, or lacks the time of a step; the line names file and key.
    """
    trajectories: list[Trajectory] = []
    taken: set[str] = set()
    for path in map(Path, paths):
        try:
            steps = _steps(_content(path))
        except TraceError as error:
            raise error.at(str(path)) from None
        trajectories.append(Trajectory(trajectory=_free_name(path, taken), job=JOB, steps=steps))
    if not trajectories:
        raise TraceError("no file to import")
    return Trace(trajectories=tuple(trajectories))


def _content(path: Path) -> _File:
    try:
        text = path.read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(error, str(path)) from None
    return validated(_File, text)


def _steps(content: _File) -> tuple[Step, ...]:
    steps = []
    for index, step in enumerate(content.trajectory):
        if step.action is None or not step.action.strip():
            continue
        if step.execution_time is None:
            raise TraceError("is missing, and the step ran a command", key=f"trajectory[{index}].execution_time")
        seconds = step.execution_time
        action = TraceAction(
            kind="cpu.exec", command=step.action, action_class=command_class(step.action), work_s=seconds, observed_s=seconds
        )
        steps.append(Step(actions=(action,)))
    if not steps:
        raise TraceError("no step of it ran a command", key="trajectory")
    return tuple(steps)


def _free_name(path: Path, taken: set[str]) -> str:
    # A name goes into tables and logs: what cannot be printed in a line, or is very long, stays behind.
    first = "".join(each for each in path.name.removesuffix(SUFFIX) if each.isprintable())[:LONGEST_NAME] or JOB
    name = first
    copy = 1
    while name in taken:
        copy += 1
        name = f"{first}#{copy}"
    taken.add(name)
    return name
