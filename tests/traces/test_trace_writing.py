"""What is read can be written and read again; whatever else is read, only `TraceError` comes of it."""

from __future__ import annotations

import io
import json
import string
from copy import deepcopy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from app.replay.trace_lines import TraceError
from app.replay.traces import read_trace_stream, write_trace
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.elasticity import Amdahl, Flat, Table

SCHEMA = "tangram.trace/1"
LIMITS = {"rate_per_s": 5.0, "concurrency": 2, "burst": 3, "tokens_per_min": 60.0, "account": "acme", "hosts": ["api.example.com"]}
TIMES = {"cpu_s": 0.5, "observed_s": 0.75, "timeout_s": 9.0}
SAID = {"class": "c", "command": "ls", "requires": ["ssd"], "idempotent": True, "preemptible": False, "priority": 7}
LINES: list[dict[str, Any]] = [
    {
        "schema": SCHEMA,
        "note": 1,
        "services": {
            "rm": {"cells": [1, 2], "memory_mb": 9, "restore_s": 0.5, "max_concurrency": 2, "pinned": True, "warm": True, "note": 2}
        },
        "quotas": {"chat": {**LIMITS, "note": 3}, "web": {"rate_per_s": 1.0, "concurrency": 1}},
    },
    {
        "schema": SCHEMA,
        "note": [4],
        "job": "j",
        "trajectory": "t",
        "arrival_s": 2.0,
        "priority": 4,
        "memory_mb": 100,
        "steps": [
            {
                "note": {"url": 5},
                "think_s": 1.0,
                "actions": [
                    {"note": None, "kind": "cpu.exec", **SAID, "work_s": 1.0, **TIMES, "memory_mb": 50, "resident_mb": 10},
                    {"kind": "cpu.exec", "work_s": 1.0, "units": [1, 2], "parallel_fraction": 0.9},
                    {"kind": "gpu.score", "service": "rm", "work_s": 1.0, "units": [1, 2], "efficiency": {"1": 1.0, "2": 0.75}},
                ],
            },
            {"think_s": 0.0, "action": {"kind": "api.call", "quota": "chat", "tokens": 6, "work_s": 1.0}},
        ],
    },
]
"""A trace with every key, one key at each level that nobody knows, in the words in which it is written."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=5,
)
# Hypothesis validates each strategy that is new, which takes longer than to draw from it. So they are made once.
TEXTS = st.text(string.printable + "äß✓", min_size=1, max_size=12)
ALIKE: dict[type, st.SearchStrategy[object]] = {float: st.floats(0.1, 1.0), int: st.integers(1, 9), bool: st.booleans(), str: TEXTS}
VALUES = JSON | st.sampled_from([float("nan"), float("inf"), 10**400, -1, True, "\ud800", [], {}])
CHARACTERS = st.sampled_from(string.printable.encode() + b"\xff\x00")


def text_of(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def written(trace: Trace) -> str:
    stream = io.StringIO()
    write_trace(trace, stream)
    return stream.getvalue()


def test_what_is_written_is_what_was_read_with_the_keys_that_nobody_knows() -> None:
    trace = read_trace_stream(io.StringIO(text_of(LINES)))
    assert [json.loads(line) for line in written(trace).splitlines()] == LINES
    (trajectory,) = trace.trajectories
    step, first = trajectory.steps[0], next(trace.actions())
    unknown = [one.extra for one in (trace, trace.services["rm"], trace.quotas["chat"], trajectory, step, first)]
    assert unknown == [{"note": note} for note in (1, 2, 3, [4], {"url": 5}, None)]
    curves = [action.elasticity.curve for action in trace.actions()]
    assert curves == [Flat(), Amdahl(0.9), Table(((1, 1.0), (2, 0.75))), Flat()]


def test_a_trace_without_services_needs_no_header() -> None:
    trace = Trace(trajectories=(Trajectory(trajectory="t", steps=(Step(actions=(TraceAction(kind="cpu.exec", work_s=1.0),)),)),))
    assert len(written(trace).splitlines()) == 1


def replace_one(lines: list[dict[str, Any]], data: st.DataObject) -> None:
    """Have a value somewhere in the lines become another one."""
    place: Any = lines
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.integers(0, 4)) == 0:
            place[key] = data.draw(VALUES if data.draw(st.integers(0, 3)) == 0 else ALIKE.get(type(place[key]), VALUES))
            return
        place = place[key]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_a_trace_with_values_or_characters_replaced_is_refused_in_one_line_or_read_and_written_alike(data: st.DataObject) -> None:
    lines = deepcopy(LINES)
    for _ in range(data.draw(st.integers(0, 2))):
        replace_one(lines, data)
    text = bytearray(text_of(lines).encode())
    for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 2]))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(CHARACTERS)
    try:
        trace = read_trace_stream(io.BytesIO(bytes(text)), "f")
    except TraceError as error:
        assert str(error).startswith("f") and str(error).isprintable()
    else:
        assert read_trace_stream(io.StringIO(written(trace))) == trace
