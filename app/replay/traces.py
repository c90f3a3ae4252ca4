"""Reading and writing `tangram.trace/1`: JSON Lines, one trajectory a line, and an optional header before them.

What may live here: the way from lines to the values of `scheduler.sim.trace` and back. Every wrong value is refused
with one line, `file:line: key: problem`; keys without a meaning here are kept. What a line may say is declared
once, in `app.replay.trace_lines`; what one line cannot know by itself (are its service and quota in the header, is its
name taken) is checked while it becomes a value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from app.replay.trace_lines import (
    SCHEMA,
    ActionLine,
    HeaderLine,
    QuotaLine,
    ServiceLine,
    StepLine,
    TraceError,
    TrajectoryLine,
    extra_of,
    first_problem,
    shown,
    unreadable,
    validated,
)
from scheduler.model import QuotaSpec, ServiceSpec
from scheduler.model.copied import filled
from scheduler.quotas.account import clash
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import Amdahl, Elasticity, Table, check_units, make_curve
from tangram.errors import InvalidAction

LONGEST_LINE_BYTES = 64 * 2**20

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
"""Where the wheel has them. In a checkout they are one folder further up."""
BUNDLED = (_EXAMPLES if _EXAMPLES.is_dir() else _EXAMPLES.parents[1] / "examples") / "rollouts.jsonl"
"""The recorded rollouts that demo and calibration replay; the repository that they work on is beside the file."""

_KEYS = TypeAdapter(dict[str, object])


def read_trace(path: str | Path) -> Trace:
    """Read a trace file. Raises `TraceError` when the file cannot be read or says something wrong."""
    try:
        with open(path, "rb") as file:
            return read_trace_stream(file, str(path))
    except TraceError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(error, str(path) or "the empty path") from None


def read_trace_stream(stream: IO[bytes] | IO[str], name: str = "<stream>") -> Trace:
    """Read a trace from an open stream of text or bytes; `name` is what errors call it.

    Raises `TraceError` when the stream cannot be read or says something wrong.
    """
    header = Trace(trajectories=())
    read: list[Trajectory] = []
    seen: dict[tuple[str, str], int] = {}
    expect_header = True
    for number, text in _numbered_lines(stream, name):
        try:
            if expect_header and _is_header(text):
                header = parse_header(text)
            else:
                trajectory = parse_trajectory(text, header)
                _refuse_second(trajectory, seen, number)
                read.append(trajectory)
        except TraceError as error:
            raise error.at(name, number) from None
        expect_header = False
    if not read:
        raise TraceError("no trajectory in it", file=name)
    return Trace(trajectories=tuple(read), services=header.services, quotas=header.quotas, extra=header.extra)


def parse_header(text: str | bytes) -> Trace:
    """Read a header line: a trace without trajectories. Raises `TraceError`, without a place."""
    line = validated(HeaderLine, text)
    services, quotas = {}, {}
    try:
        for name, service in line.services.items():
            services[name] = _service(name, service)
    except TraceError as error:
        raise error.inside(f"services.{name}") from None
    try:
        for name, quota in line.quotas.items():
            quotas[name] = _quota(name, quota)
    except TraceError as error:
        raise error.inside(f"quotas.{name}") from None
    if found := clash(tuple(quotas.values())):
        raise TraceError(found[1], key=f"quotas.{found[0]}")
    return Trace(trajectories=(), services=services, quotas=quotas, extra=extra_of(line))


def parse_trajectory(text: str | bytes, header: Trace) -> Trajectory:
    """Read a line with a trajectory, whose services and quotas are in `header`. Raises `TraceError`, without a place."""
    line = validated(TrajectoryLine, text)
    steps = []
    for index, step in enumerate(line.steps):
        try:
            steps.append(_step(step, header))
        except TraceError as error:
            raise error.inside(f"steps[{index}]") from None
    return filled(Trajectory, line, steps=tuple(steps), memory_mb=_whole(line.memory_mb), extra=extra_of(line))


def write_trace(trace: Trace, stream: IO[str]) -> None:
    """Write `trace` as text that `read_trace` reads to an equal value. The stream stays open."""
    if trace.services or trace.quotas or trace.extra:
        services = {name: _service_line(spec) for name, spec in trace.services.items()}
        quotas = {name: {**spec.extra, **_said(limits_of(spec))} for name, spec in trace.quotas.items()}
        stream.write(_written({"schema": SCHEMA, **trace.extra, "services": services, "quotas": quotas}))
    for trajectory in trace.trajectories:
        stream.write(_written(_trajectory_line(trajectory)))


# Reading: from lines to values


def _numbered_lines(stream: IO[bytes] | IO[str], name: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(LONGEST_LINE_BYTES)
        except (OSError, ValueError) as error:
            raise unreadable(error, name, number) from None
        if not line:
            return
        if len(line) >= LONGEST_LINE_BYTES:
            raise TraceError(f"longer than {LONGEST_LINE_BYTES} bytes", file=name, line=number)
        # A text stream may hold surrogates in place of bytes that are no UTF-8; the JSON reader then says so.
        text = line if isinstance(line, bytes) else line.encode("utf-8", "surrogatepass")
        if text.strip():
            yield number, text


def _is_header(text: bytes) -> bool:
    try:
        keys = _KEYS.validate_json(text)
    except ValidationError as error:
        raise first_problem(error) from None
    # A line with steps was meant as a trajectory, and a wrong one is better told so than read as a header.
    return "trajectory" not in keys and "steps" not in keys


def _refuse_second(trajectory: Trajectory, seen: dict[tuple[str, str], int], number: int) -> None:
    first = seen.setdefault((trajectory.job, trajectory.trajectory), number)
    if first != number:
        raise TraceError(f"{shown(trajectory.trajectory)} of job {shown(trajectory.job)} is already on line {first}", key="trajectory")


def _step(line: StepLine, header: Trace) -> Step:
    if (line.action is None) == (line.actions is None):
        raise TraceError("give either action or actions" + (", not both" if line.action else ""))
    if line.action is not None:
        actions: tuple[TraceAction, ...] = (_action(line.action, header, "action"),)
    else:
        actions = tuple(_action(each, header, f"actions[{index}]") for index, each in enumerate(line.actions or ()))
    return Step(actions=actions, think_s=line.think_s, extra=extra_of(line))


def _action(line: ActionLine, header: Trace, key: str) -> TraceAction:
    try:
        _check_names(line, header)
        efficiency = None if line.efficiency is None else tuple(line.efficiency.items())
        elasticity = _elasticity(line.units, line.parallel_fraction, efficiency)
        memory_mb, resident_mb = _whole(line.memory_mb), _whole(line.resident_mb)
        return filled(TraceAction, line, elasticity=elasticity, memory_mb=memory_mb, resident_mb=resident_mb, extra=extra_of(line))
    except InvalidAction as error:
        raise TraceError(str(error).removeprefix(f"{error.field}: "), key=f"{key}.{error.field}") from None
    except TraceError as error:
        raise error.inside(key) from None


def _check_names(line: ActionLine, header: Trace) -> None:
    on_gpu = line.kind.startswith("gpu.")
    if on_gpu and line.service is None:
        raise TraceError(f"is missing, and {line.kind} needs one", key="service")
    if not on_gpu and line.service is not None:
        raise TraceError(f"only gpu actions have one, not {line.kind}", key="service")
    if line.service is not None and line.service not in header.services:
        raise TraceError(f"{shown(line.service)} is not among the header's services", key="service")
    if line.kind == "api.call" and line.quota is None:
        raise TraceError("is missing, and api.call needs one", key="quota")
    if line.tokens is not None and line.quota is None:
        raise TraceError("only actions with a quota have some", key="tokens")
    if line.quota is not None and line.quota not in header.quotas:
        raise TraceError(f"{shown(line.quota)} is not among the header's quotas", key="quota")


def _whole(megabytes: float | None) -> int | None:
    return None if megabytes is None else math.ceil(megabytes)


@lru_cache(maxsize=4096)
def _elasticity(units: tuple[int, ...], fraction: float | None, efficiency: tuple[tuple[str, float], ...] | None) -> Elasticity:
    # A trace has hundreds of thousands of actions and a handful of elasticities: equal ones are one object.
    return Elasticity(units=units, curve=make_curve(fraction, None if efficiency is None else dict(efficiency)))


def _service(name: str, line: ServiceLine) -> ServiceSpec:
    try:
        check_units(line.cells, "cells")
    except InvalidAction as error:
        raise TraceError(str(error).removeprefix("cells: "), key="cells") from None
    return ServiceSpec(
        name=name, cells=line.cells, memory_mb=math.ceil(line.memory_mb), restore_s=line.restore_s,
        max_concurrency=line.max_concurrency, pinned=line.pinned, warm=line.warm, extra=extra_of(line),
    )  # fmt: skip


def _quota(name: str, line: QuotaLine) -> QuotaSpec:
    return QuotaSpec(
        name=name, rate_per_s=line.rate_per_s, concurrency=line.concurrency, burst=line.burst,
        tokens_per_min=line.tokens_per_min, account=line.account, hosts=line.hosts or (), extra=extra_of(line),
    )  # fmt: skip


# Writing: from values to lines


def _written(line: Mapping[str, object]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def _said(line: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in line.items() if value is not None}


def _trajectory_line(trajectory: Trajectory) -> dict[str, object]:
    known = {"job": trajectory.job, "trajectory": trajectory.trajectory, "arrival_s": trajectory.arrival_s}
    bounds = {"priority": trajectory.priority, "memory_mb": trajectory.memory_mb}
    steps = [_step_line(step) for step in trajectory.steps]
    return {"schema": SCHEMA, **trajectory.extra, **_said({**known, **bounds}), "steps": steps}


def _step_line(step: Step) -> dict[str, object]:
    actions = [_action_line(action) for action in step.actions]
    what: dict[str, object] = {"action": actions[0]} if len(actions) == 1 else {"actions": actions}
    return {**step.extra, "think_s": step.think_s, **what}


def _action_line(action: TraceAction) -> dict[str, object]:
    curve = action.elasticity.curve
    known = {
        "kind": action.kind, "class": action.action_class, "service": action.service, "quota": action.quota, "tokens": action.tokens,
        "command": action.command, "requires": list(action.requires) or None, "work_s": action.work_s,
        "units": None if action.elasticity.units == (1,) else list(action.elasticity.units),
        "parallel_fraction": curve.parallel_fraction if isinstance(curve, Amdahl) else None,
        "efficiency": {str(units): value for units, value in curve.efficiency} if isinstance(curve, Table) else None,
        "cpu_s": action.cpu_s, "observed_s": action.observed_s, "timeout_s": action.timeout_s,
        "idempotent": action.idempotent,
        "preemptible": None if action.preemptible else False, "priority": action.priority, "memory_mb": action.memory_mb,
        "resident_mb": action.resident_mb,
    }  # fmt: skip
    return {**action.extra, **_said(known)}


def _service_line(spec: ServiceSpec) -> dict[str, object]:
    cells = spec.cells[0] if len(spec.cells) == 1 else list(spec.cells)
    known = {"cells": cells, "memory_mb": spec.memory_mb, "restore_s": spec.restore_s, "max_concurrency": spec.max_concurrency}
    return {**spec.extra, **known, **{word: True for word in ("pinned", "warm") if getattr(spec, word)}}


def limits_of(spec: QuotaSpec) -> dict[str, object]:
    """Return what a quota's table in a trace or a services file says of its limits."""
    return {
        "rate_per_s": spec.rate_per_s, "concurrency": spec.concurrency, "burst": spec.burst,
        "tokens_per_min": spec.tokens_per_min, "account": spec.account, "hosts": list(spec.hosts) or None,
    }  # fmt: skip
