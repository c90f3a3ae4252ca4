"""What is read can be written and read again; whatever else is read, only `TraceError` comes of it."""

from __future__ import annotations

import io
import json
import string

from hypothesis import given, settings
from hypothesis import strategies as st

from app.replay.trace_lines import TraceError
from app.replay.traces import read_trace_stream, write_trace
from scheduler.model import QuotaSpec, ServiceSpec
from scheduler.sim.trace import KINDS, Step, Trace, TraceAction, Trajectory
from tangram.elasticity import Amdahl, Elasticity, Flat, Table

# Strategies are made once: Hypothesis validates each that is new, which takes longer than to draw from it.
NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12)
SECONDS, LIMITS, SHARES = st.floats(0, 1e9, allow_nan=False), st.floats(0.001, 1e9), st.floats(1e-6, 1)
COUNTS, PRIORITIES = st.integers(1, 10**6), st.integers(0, 9)
MEMORY = st.none() | st.integers(0, 10**9)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
# Keys of the future: none of them is known today, some look like the words of the code.
EXTRA = st.dictionaries(st.sampled_from(["note", "url", "files", "extra", "schema_", "action_class", "model_extra"]), JSON, max_size=2)
UNITS = st.sets(st.integers(1, 64), min_size=1, max_size=4).map(sorted).map(tuple)
CURVES = {"flat": lambda _: Flat(), "amdahl": lambda shares: Amdahl(shares[0][1]), "table": Table}
ELASTICITIES = st.builds(
    lambda units, curve, shares: Elasticity(units=units, curve=CURVES[curve](tuple(zip(units, shares, strict=False)))),
    UNITS, st.sampled_from(sorted(CURVES)), st.tuples(*[SHARES] * 4),
)  # fmt: skip
ACTIONS = st.fixed_dictionaries(
    {
        "work_s": SECONDS,
        "elasticity": ELASTICITIES,
        "action_class": st.none() | NAMES,
        "command": st.none() | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        "requires": st.lists(NAMES, max_size=2).map(tuple),
        "cpu_s": st.none() | SECONDS,
        "observed_s": st.none() | SECONDS,
        "timeout_s": st.none() | LIMITS,
        "idempotent": st.none() | st.booleans(),
        "priority": st.none() | PRIORITIES,
        "memory_mb": MEMORY,
        "extra": EXTRA,
    }
)
SERVICES = st.fixed_dictionaries(
    {
        "cells": st.sets(st.integers(1, 8), min_size=1, max_size=3).map(sorted).map(tuple),
        "memory_mb": COUNTS,
        "restore_s": SECONDS,
        "max_concurrency": COUNTS,
        "pinned": st.booleans(),
        "warm": st.booleans(),
    }
)
QUOTAS = st.fixed_dictionaries(
    {
        "rate_per_s": LIMITS,
        "concurrency": COUNTS,
        "burst": st.none() | COUNTS,
        "tokens_per_min": st.none() | st.floats(0.001, 1e12),
        "hosts": st.sampled_from([(), ("*",), ("api.example.com", "10.0.0.0/8")]),
    }
)
NAMED = st.sets(NAMES, max_size=2)
TRAJECTORIES = st.fixed_dictionaries({"arrival_s": SECONDS, "priority": PRIORITIES, "memory_mb": MEMORY, "extra": EXTRA})
STEPS = st.fixed_dictionaries({"think_s": SECONDS, "extra": EXTRA})
COUNT, TRAJECTORY_NAMES = st.integers(1, 2), st.sets(st.tuples(NAMES, NAMES), min_size=1, max_size=2)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    services = {name: ServiceSpec(name=name, **draw(SERVICES)) for name in draw(NAMED)}
    quotas = {name: QuotaSpec(name=name, **draw(QUOTAS)) for name in draw(NAMED)}
    there = ("cpu.", *(["gpu."] if services else []), *(["api."] if quotas else []))
    kinds = st.sampled_from([kind for kind in KINDS if kind.startswith(there)])
    of_service, of_quota = (st.sampled_from(sorted(names) or [""]) for names in (services, quotas))

    def action() -> TraceAction:
        kind = draw(kinds)
        service = draw(of_service) if kind.startswith("gpu.") else None
        return TraceAction(kind=kind, service=service, quota=draw(of_quota) if kind == "api.call" else None, **draw(ACTIONS))

    def step() -> Step:
        return Step(actions=tuple(action() for _ in range(draw(COUNT))), **draw(STEPS))

    trajectories = tuple(
        Trajectory(job=job, trajectory=name, steps=tuple(step() for _ in range(draw(COUNT))), **draw(TRAJECTORIES))
        for job, name in sorted(draw(TRAJECTORY_NAMES))
    )
    return Trace(trajectories=trajectories, services=services, quotas=quotas, extra=draw(EXTRA))


def written(trace: Trace) -> str:
    stream = io.StringIO()
    write_trace(trace, stream)
    return stream.getvalue()


def read_or_refuse(text: bytes) -> None:
    try:
        read_trace_stream(io.BytesIO(text), "f")
    except TraceError as error:
        assert str(error).startswith("f")
        assert str(error).isprintable()


@given(traces())
@settings(max_examples=10, deadline=None)
def test_what_is_written_is_read_again(trace: Trace) -> None:
    assert read_trace_stream(io.StringIO(written(trace))) == trace


def test_unknown_keys_are_written_again_everywhere() -> None:
    # Given a file with a key at every level that nobody knows, one of them without a value
    header = {"schema": "tangram.trace/1", "a": 1, "services": {"rm": {"cells": 1, "b": 2}}, "quotas": {}}
    action = {"kind": "cpu.exec", "work_s": 1.0, "c": None}
    line = {"schema": "tangram.trace/1", "trajectory": "t", "d": [3], "steps": [{"action": action, "e": {"f": 4}}]}
    text = json.dumps(header) + "\n" + json.dumps(line) + "\n"
    lines = [json.loads(each) for each in written(read_trace_stream(io.StringIO(text))).splitlines()]
    assert (lines[0]["a"], lines[0]["services"]["rm"]["b"], lines[1]["d"]) == (1, 2, [3])
    assert lines[1]["steps"][0]["e"] == {"f": 4}
    assert "c" in lines[1]["steps"][0]["action"]


def test_a_trace_without_services_needs_no_header() -> None:
    trace = Trace(trajectories=(Trajectory(trajectory="t", steps=(Step(actions=(TraceAction(kind="cpu.exec", work_s=1.0),)),)),))
    assert len(written(trace).splitlines()) == 1


@given(traces(), st.data())
@settings(max_examples=20, deadline=None)
def test_a_trace_with_a_value_or_characters_replaced_is_read_or_refused(trace: Trace, data: st.DataObject) -> None:
    lines = [json.loads(line) for line in written(trace).splitlines()]
    # When a value somewhere in them becomes another, or its key goes
    place: object = lines
    while isinstance(place, (dict, list)) and place:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(JSON | st.sampled_from([float("nan"), float("inf"), 10**400, -1, True, "\ud800", [], {}]))
            break
        place = place[key]
    # And perhaps a character
    text = bytearray("".join(json.dumps(line) + "\n" for line in lines).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(string.printable.encode() + b"\xff\x00"))
    read_or_refuse(bytes(text))
