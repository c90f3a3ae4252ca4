"""What a trace file may say, and how a wrong one is refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from app.replay.trace_lines import TraceError
from app.replay.traces import read_trace, read_trace_stream
from scheduler.sim.trace import Trace
from tangram.elasticity import Amdahl, Flat

HEADER = (
    '{"schema": "tangram.trace/1", "services": {"rm": {"cells": [1, 2], "memory_mb": 100, "restore_s": 0.5, "max_concurrency": 2,'
    ' "warm": true}},'
    ' "quotas": {"search": {"rate_per_s": 5, "concurrency": 2}}}\n'
)
LINE = '{"schema": "tangram.trace/1", "job": "j", "trajectory": "t", "steps": [{"think_s": 1, "action": %s}]}\n'
STEPS = '{"schema": "tangram.trace/1", "trajectory": "t", "steps": %s}\n'
EXEC = '{"kind": "cpu.exec", "work_s": 1}'


def read(text: str | bytes) -> Trace:
    return read_trace_stream(io.BytesIO(text if isinstance(text, bytes) else text.encode()), "f.jsonl")


def refusal(text: str | bytes) -> str:
    with pytest.raises(TraceError) as caught:
        read(text)
    said = str(caught.value)
    assert said.isprintable(), "an error is one line"
    assert len(said) < 300
    return said


def test_a_line_is_read_with_its_defaults() -> None:
    trace = read(STEPS % f'[{{"action": {EXEC}}}]')
    (trajectory,) = trace.trajectories
    assert (trajectory.job, trajectory.arrival_s, trajectory.priority, trajectory.memory_mb) == ("default", 0.0, 5, None)
    (step,) = trajectory.steps
    assert step.think_s == 0.0
    (action,) = step.actions
    assert (action.kind, action.work_s, action.elasticity.units, action.elasticity.curve) == ("cpu.exec", 1.0, (1,), Flat())


def test_every_key_of_an_action_is_read() -> None:
    trace = read(
        HEADER
        + LINE
        % (
            '{"kind": "gpu.score", "service": "rm", "quota": "search", "units": [1, 2], "work_s": 2, "parallel_fraction": 0.5,'
            ' "class": "c", "command": "x", "requires": ["a"], "cpu_s": 3,'
            ' "observed_s": 4, "timeout_s": 5, "idempotent": true, "priority": 6,'
            ' "memory_mb": 6.5, "items": [1, {"a": null}]}'
        )
    )
    (action,) = trace.actions()
    assert (action.service, action.quota, action.action_class, action.command, action.requires) == ("rm", "search", "c", "x", ("a",))
    assert (action.cpu_s, action.observed_s, action.timeout_s, action.idempotent, action.priority) == (3.0, 4.0, 5.0, True, 6)
    assert action.memory_mb == 7, "a part of a megabyte needs the whole"
    assert action.elasticity.curve == Amdahl(0.5)
    assert action.floor_s == pytest.approx(1.5)
    assert action.extra == {"items": [1, {"a": None}]}


def test_actions_of_one_step_stay_together() -> None:
    trace = read(STEPS % f'[{{"actions": [{EXEC}, {EXEC}]}}, {{"action": {EXEC}}}]')
    assert [len(step.actions) for step in trace.trajectories[0].steps] == [2, 1]


def test_the_same_name_in_two_jobs_is_two_trajectories() -> None:
    assert len(read(LINE % EXEC + (LINE % EXEC).replace('"j"', '"k"')).trajectories) == 2


WRONG_ACTIONS = {
    '{"kind": "cpu.exec", "work_s": 1, "tokens": 5}': "action.tokens: only actions with a quota have some",
    '{"kind": "cpu.exec", "work_s": -1}': "action.work_s: should be greater than or equal to 0, not -1",
    '{"kind": "cpu.exec", "work_s": NaN}': "action.work_s: should be a finite number",
    '{"kind": "cpu.exec", "work_s": true}': "action.work_s: should be a valid number, not True",
    '{"kind": "cpu.exec"}': "action.work_s: is missing",
    '{"work_s": 1}': "action.kind: is missing",
    '{"kind": "fly", "work_s": 1}': "action.kind: should be 'cpu.exec', ",
    '{"kind": "cpu.exec", "work_s": 1, "units": [0]}': "action.units[0]: should be greater than or equal to 1",
    '{"kind": "cpu.exec", "work_s": 1, "units": [2, 1]}': "action.units: amounts must be ascending and distinct",
    '{"kind": "cpu.exec", "work_s": 1, "units": []}': "action.units: must name at least one",
    '{"kind": "cpu.exec", "work_s": 1, "parallel_fraction": 1, "efficiency": {}}': "action.efficiency: give either",
    '{"kind": "cpu.exec", "work_s": 1, "units": [1, 4], "efficiency": {"1": 1}}': "action.efficiency: says nothing of 4 units",
    '{"kind": "cpu.exec", "work_s": 1, "efficiency": {"x\\n": 1}}': "action.efficiency.x?: ",
    '{"kind": "cpu.exec", "work_s": 1, "priority": 10}': "action.priority: should be less than or equal to 9",
    '{"kind": "cpu.exec", "work_s": 1, "idempotent": 1}': "action.idempotent: should be a valid boolean",
    '{"kind": "cpu.exec", "work_s": 1, "class": ""}': "action.class: must not be empty",
    '{"kind": "cpu.exec", "work_s": 1, "command": "a\\u0000"}': "action.command: has characters that may not be in it",
    '{"kind": "cpu.exec", "work_s": 1, "command": "\\ud800"}': "not JSON",
    '{"kind": "cpu.exec", "work_s": 1, "service": "rm"}': "action.service: only gpu actions have one",
    '{"kind": "cpu.exec", "work_s": 1, "note": [NaN]}': "action.note: holds a number that JSON does not know",
    '{"kind": "gpu.score", "work_s": 1}': "action.service: is missing",
    '{"kind": "gpu.score", "work_s": 1, "service": "nobody"}': "action.service: 'nobody' is not among the header's services",
    '{"kind": "api.call", "work_s": 1}': "action.quota: is missing",
    '{"kind": "api.call", "work_s": 1, "quota": "nothing"}': "action.quota: 'nothing' is not among the header's quotas",
    "[]": "action: should be an object, not []",
    '{"kind": "cpu.exec", "work_s": %s}' % ("9" * 9000): "not JSON: number out of range",
    '{"kind": "cpu.exec", "work_s": 1, "deep": %s' % ("[" * 10**5): "not JSON: recursion limit exceeded",
}


@pytest.mark.parametrize("action", WRONG_ACTIONS, ids=lambda text: text[:70])
def test_a_wrong_action_is_refused_by_its_key(action: str) -> None:
    said = refusal(HEADER + LINE % action)
    place = "f.jsonl:2: " if WRONG_ACTIONS[action].startswith("not JSON") else "f.jsonl:2: steps[0]."
    assert said.startswith(place + WRONG_ACTIONS[action])


WRONG_STEPS = {
    "[]": "steps: must not be empty",
    "{}": "steps: should be a valid array",
    "[3]": "steps[0]: should be an object",
    "[{}]": "steps[0]: give either action or actions",
    '[{"action": null}]': "steps[0]: give either action or actions",
    '[{"actions": []}]': "steps[0].actions: must not be empty",
    f'[{{"action": {EXEC}, "actions": [{EXEC}]}}]': "steps[0]: give either action or actions, not both",
    f'[{{"action": {EXEC}}}, {{"think_s": -1, "action": {EXEC}}}]': "steps[1].think_s: should be greater than or equal to 0",
    f'[{{"actions": [{EXEC}, {{"kind": "api.call", "work_s": 1}}]}}]': "steps[0].actions[1].quota: is missing",
}


@pytest.mark.parametrize("steps", WRONG_STEPS)
def test_a_wrong_step_is_refused_by_its_key(steps: str) -> None:
    assert refusal(STEPS % steps).startswith("f.jsonl:1: " + WRONG_STEPS[steps])


WRONG_FILES = {
    "": "f.jsonl: no trajectory in it",
    "\n\n": "f.jsonl: no trajectory in it",
    HEADER: "f.jsonl: no trajectory in it",
    "hello\n": "f.jsonl:1: not JSON",
    "[]\n": "f.jsonl:1: should be an object",
    '{"schema": "x", "steps": []}\n': "f.jsonl:1: schema: should be 'tangram.trace/1', not 'x'",
    '{"trajectory": "t", "steps": []}\n': "f.jsonl:1: schema: is missing",
    '{"schema": "tangram.trace/1", "steps": []}\n': "f.jsonl:1: trajectory: is missing",
    HEADER + HEADER: "f.jsonl:2: trajectory: is missing",
    LINE % EXEC * 2: "f.jsonl:2: trajectory: 't' of job 'j' is already on line 1",
    (LINE % EXEC).replace('"t"', '"a\\nb"'): "f.jsonl:1: trajectory: has characters",
    HEADER.replace("[1, 2]", "[2, 1]"): "f.jsonl:1: services.rm.cells: amounts must be ascending",
    HEADER.replace('"warm": true', '"warm": "yes"'): "f.jsonl:1: services.rm.warm: ",
    HEADER.replace('"rate_per_s": 5', '"rate_per_s": 0'): "f.jsonl:1: quotas.search.rate_per_s: should be greater than 0",
    HEADER.replace(
        '"search": {', '"b": {"rate_per_s": 9, "concurrency": 1}, "search": {"account": "b", '
    ): "f.jsonl:1: quotas.search: account",
    HEADER.replace('"rate_per_s": 5', '"x": Infinity, "rate_per_s": 5'): "f.jsonl:1: quotas.search.x: holds a number",
}


@pytest.mark.parametrize("text", WRONG_FILES, ids=WRONG_FILES.values())
def test_a_wrong_file_is_refused(text: str) -> None:
    assert refusal(text).startswith(WRONG_FILES[text])


def test_bytes_that_are_no_utf8_are_refused_with_their_line() -> None:
    assert refusal((HEADER + LINE % EXEC).encode() + b'{"schema": "\xff"}').startswith("f.jsonl:3: not JSON")


def test_a_text_stream_that_cannot_be_decoded_is_refused() -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    with pytest.raises(TraceError, match=r"^<stream>:1: cannot be read: "):
        read_trace_stream(stream)


def test_a_line_without_end_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.replay.traces.LONGEST_LINE_BYTES", 1000)
    assert refusal(HEADER + " " * 5000) == "f.jsonl:2: longer than 1000 bytes"


@pytest.mark.parametrize(("path", "reason"), [("nowhere.jsonl", "no such file"), (".", "is a directory"), ("a\0b", "null byte")])
def test_what_is_no_readable_file_is_refused(path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)
