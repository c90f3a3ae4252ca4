"""OpenTelemetry's spans as traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.replay.importers.spans import import_spans, read_rules
from app.replay.trace_lines import TraceError
from tests.cli.forked import forked

NOON = 1_767_268_800
TOOL = {"gen_ai.operation.name": "execute_tool"}


def otlp(number: str, start_s: float, end_s: float, *, parent: str = "", trace: str = "aa", **attributes: str) -> dict[str, Any]:
    """A span as OTLP/JSON writes it, `start_s` and `end_s` after noon; `__` in a name stands for a dot."""
    named = {name.replace("__", "."): value for name, value in attributes.items()}
    return {
        "traceId": trace,
        "spanId": number,
        "parentSpanId": parent,
        "name": named.pop("name", f"execute_tool {number}"),
        "startTimeUnixNano": str(round((NOON + start_s) * 10**9)),
        "endTimeUnixNano": str(round((NOON + end_s) * 10**9)),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in named.items()],
    }


def call(number: str, start_s: float, end_s: float, tool: str = "bash", **more: Any) -> dict[str, Any]:
    return otlp(number, start_s, end_s, gen_ai__operation__name="execute_tool", gen_ai__tool__name=tool, **more)


def written(folder: Path, *spans: dict[str, Any], service: str = "coder", name: str = "spans.jsonl") -> Path:
    """One line for each span, as an exporter that sends at once writes them."""
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    lines = [{"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {}, "spans": [span]}]}]} for span in spans]
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(TraceError) as caught:
        import_spans([path], **more)
    said = str(caught.value)
    assert said.isprintable()
    return said.removeprefix(f"{path}:")


def test_tool_calls_of_a_trace_become_steps_with_thinking_between_them(tmp_path: Path) -> None:
    agent = otlp("root", 10, 30, name="invoke_agent", gen_ai__operation__name="invoke_agent")
    chat = otlp("chat", 10, 12, parent="root", name="chat", gen_ai__operation__name="chat")
    first, second = call("a", 12, 12.5, parent="root"), call("b", 15.5, 17, tool="pytest", parent="root")
    other = call("c", 4, 5, trace="bb")
    trace = import_spans([written(tmp_path, agent, second, chat, first, other)])
    found = {each.trajectory: each for each in trace.trajectories}
    assert [(name, each.job, each.arrival_s) for name, each in found.items()] == [("bb", "coder", 0.0), ("aa", "coder", 6.0)]
    steps = [
        (step.think_s, [(each.kind, each.action_class, each.work_s, each.observed_s) for each in step.actions])
        for step in found["aa"].steps
    ]
    assert steps == [(2.0, [("cpu.exec", "bash", 0.5, 0.5)]), (3.0, [("cpu.exec", "pytest", 1.5, 1.5)])]


def test_calls_that_all_overlap_are_one_step_and_a_call_after_the_first_end_is_the_next(tmp_path: Path) -> None:
    spans = [call("a", 0, 4), call("b", 0.1, 2), call("c", 1, 3), call("d", 2, 5)]
    (trajectory,) = import_spans([written(tmp_path, *spans)]).trajectories
    assert [(step.think_s, len(step.actions)) for step in trajectory.steps] == [(0.0, 3), (0.0, 1)]


def test_a_call_with_calls_inside_is_as_long_as_these(tmp_path: Path) -> None:
    spans = [call("agent", 0, 9, tool="sub-agent"), otlp("turn", 0, 9, parent="agent", name="turn"), call("x", 1, 2, parent="turn")]
    (trajectory,) = import_spans([written(tmp_path, *spans)]).trajectories
    assert [each.work_s for each in trajectory.actions()] == [1.0]
    assert trajectory.steps[0].think_s == 1.0


def test_an_attribute_may_tell_trajectories_apart(tmp_path: Path) -> None:
    spans = [call("a", 0, 1, gen_ai__conversation__id="talk"), call("b", 2, 3, trace="bb", gen_ai__conversation__id="talk")]
    path = written(tmp_path, *spans, otlp("c", 1, 2, name="chat"))
    (trajectory,) = import_spans([path], trajectory="gen_ai.conversation.id").trajectories
    assert (trajectory.trajectory, len(trajectory.steps)) == ("talk", 2)
    assert "without the attribute user" in refusal(path, trajectory="user")


def test_plain_spans_in_a_list_say_the_same_as_otlp(tmp_path: Path) -> None:
    plain = {
        "name": "execute_tool bash",
        "context": {"trace_id": "aa", "span_id": "a", "trace_state": "[]"},
        "parent_id": None,
        "start_time": "2026-01-01T12:00:00.000000Z",
        "end_time": "2026-01-01T12:00:00.250000Z",
        "attributes": {**TOOL, "gen_ai.tool.name": "bash"},
        "resource": {"attributes": {"service.name": "coder"}},
    }
    path = tmp_path / "spans.json"
    path.write_text(json.dumps([plain], indent=4))
    assert import_spans([path]) == import_spans([written(tmp_path, call("a", 0, 0.25))])


def test_rules_say_what_tool_calls_become(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rules]]\ntool = "web_*"\nkind = "api.call"\nquota = "search"\n'
        '[[rules]]\nspan = "sandbox.run"\nkind = "cpu.exec"\nunits = [1, 2]\nparallel_fraction = 0.5\nclass = "run"\n'
        "[quotas.search]\nrate_per_s = 20.0\nconcurrency = 8\n"
    )
    spans = [call("a", 0, 1, tool="web_search"), otlp("b", 2, 3, name="sandbox.run"), call("c", 4, 5, tool="edit")]
    trace = import_spans([written(tmp_path, *spans)], rules=read_rules(rules))
    found = [(each.kind, each.action_class, each.quota, each.elasticity.units) for each in trace.actions()]
    assert found == [("api.call", "web_search", "search", (1,)), ("cpu.exec", "run", None, (1, 2)), ("cpu.exec", "edit", None, (1,))]


def test_a_span_that_was_exported_twice_counts_once(tmp_path: Path) -> None:
    first, again = written(tmp_path, call("a", 0, 1)), written(tmp_path, call("a", 0, 1), name="again.jsonl")
    (trajectory,) = import_spans([first, again]).trajectories
    assert len(list(trajectory.actions())) == 1
    differs = written(tmp_path, call("a", 0, 1), call("a", 0, 2), name="differs.jsonl")
    assert "two spans of trace 'aa' have the id 'a'" in refusal(differs)


SPAN = {"trace_id": "aa", "span_id": "a", "start_time": 1.0, "end_time": 2.0, "attributes": TOOL}
WRONG = [
    ("{", "1: not JSON"),
    ("9" * 5000, "1: not JSON: a number is too long"),
    ("3", "should be a span, a list of spans or an object with resourceSpans, not 3"),
    ('{"resourceMetrics": []}', "holds metrics or logs, not spans"),
    ('{"resourceSpans": []}', "none of its 0 spans is a tool call"),
    (json.dumps({**SPAN, "attributes": {}}), "none of its 1 spans is a tool call"),
    (json.dumps({**SPAN, "end_time": 0.5}), "span 'a' ends 0.5 s before it starts"),
    (json.dumps({**SPAN, "end_time": "noon"}), "end_time: should be a time with its zone"),
    (json.dumps({**SPAN, "end_time": None}), "end_time"),
    (json.dumps({**SPAN, "start_time": 1.0, "end_time": 1.7e9}), "takes more than 1000000000 s"),
    (json.dumps([SPAN, {**SPAN, "trace_id": ""}]), "[1].trace_id: must not be empty"),
    (json.dumps({**SPAN, "attributes": {**TOOL, "gen_ai.tool.name": "\u001b[1m"}, "end_time": float("nan")}), "end_time"),
]


@pytest.mark.parametrize(("text", "said"), WRONG)
def test_what_makes_no_sense_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "spans.json"
    path.write_text(text)
    assert said in refusal(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules = 3", "rules: should be tables"),
        ('[[rules]]\nkind = "cpu.exec"', "rules[0]: should have tool or span"),
        ('[[rules]]\ntool = "x"\nkind = "api.call"\nquota = "none"', "rules[0].quota: 'none' is not among the header's quotas"),
        ('[[rules]]\ntool = "x"\nkind = "cpu.run"', "rules[0].kind"),
        ("[other]", "other: is none of rules, services, quotas"),
        ("rules", "not TOML"),
    ],
)
def test_wrong_rules_are_refused_with_their_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_rules(path)
    assert said in str(caught.value)


def test_the_command_writes_a_trace_that_can_be_replayed(tmp_path: Path) -> None:
    path = written(tmp_path, call("a", 0, 1), call("b", 3, 4, trace="bb"))
    done = forked("import", "spans", str(path), "-o", "trace.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    replayed = forked("replay", "trace.jsonl", "--simulate", "--cores", "2", "--json", cwd=tmp_path)
    assert (json.loads(replayed.stdout)["trajectories"], json.loads(replayed.stdout)["mean_act"]) == (2, 1.0)
    refused = forked("import", "spans", str(tmp_path / "none"), cwd=tmp_path)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
