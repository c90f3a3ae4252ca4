"""OpenTelemetry's spans as a trace: one trajectory a trace id, one action a span of a tool call.

By OpenTelemetry's semantic conventions for generative AI (`gen-ai-agent-spans`, "Execute tool span"; in development as of their version
1.41) a tool call is a span with `gen_ai.operation.name = "execute_tool"`, and `gen_ai.tool.name` names the tool. docs/traces.md says what
of spans becomes what.

Every tool is a `cpu.exec` on one core unless a file of rules says otherwise (docs/traces.md). The first rule that fits counts; a rule with
`span` makes tool calls of spans that the conventions do not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from app.replay.importers.span_files import NANO, Span, read_spans
from app.replay.trace_lines import SCHEMA, TraceError, read_toml, shown
from app.replay.traces import parse_header, parse_trajectory
from scheduler.sim.trace import Trace, Trajectory

OPERATION, TOOL_CALL, TOOL = "gen_ai.operation.name", "execute_tool", "gen_ai.tool.name"
JOB_ATTRIBUTE, JOB = "service.name", "spans"
LONGEST_NAME = 200
LONGEST_S = 10**9


@dataclass(frozen=True, slots=True)
class Rule:
    """What the tool calls that fit it become: keys of an action in a trace."""

    tool: str | None
    span: str | None
    action: Mapping[str, Any]

    def fits(self, span: Span) -> bool:
        """Say whether a span falls under this rule."""
        if self.span is not None and not fnmatchcase(span.name, self.span):
            return False
        if self.tool is not None:
            return _is_tool_call(span) and fnmatchcase(span.attributes.get(TOOL, span.name), self.tool)
        return self.span is not None


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules in their order, and the services and quotas that they name, as a trace's header."""

    rules: tuple[Rule, ...] = ()
    header: Trace = field(default_factory=lambda: Trace(trajectories=()))

    def action_of(self, span: Span) -> Mapping[str, Any] | None:
        """Return the keys of the action that a span becomes; None where it is no tool call."""
        for rule in self.rules:
            if rule.fits(span):
                return rule.action
        return {"kind": "cpu.exec"} if _is_tool_call(span) else None


def import_spans(paths: Iterable[Path], *, trajectory: str | None = None, rules: Rules | None = None) -> Trace:
    """Read files of spans as one trace; `trajectory` is the attribute that tells trajectories apart, by default the trace id does.

    Raises `TraceError` when a file cannot be read or a span makes no sense; the line names file, line and key.
    """
    rules = rules or Rules()
    spans = _distinct(paths)
    groups: dict[str, list[tuple[Path, Span]]] = {}
    for path, span in spans:
        _check_times(path, span)
        groups.setdefault(_trajectory_of(path, span, trajectory, rules), []).append((path, span))
    containers = _containers([span for _, span in spans if rules.action_of(span) is not None], [span for _, span in spans])
    first_ns = min((span.start_ns for _, span in spans), default=0)
    found = []
    for name, members in groups.items():
        calls = [span for _, span in members if (span.trace, span.id) not in containers and rules.action_of(span) is not None]
        if calls:
            found.append(_trajectory(name, [span for _, span in members], calls, first_ns, rules))
    if not found:
        named = ", ".join(map(str, paths))
        raise TraceError(f"none of its {len(spans)} spans is a tool call ({OPERATION} = {TOOL_CALL!r}, or a rule's span)", file=named)
    return replace(rules.header, trajectories=tuple(_with_free_names(found)))


def _distinct(paths: Iterable[Path]) -> list[tuple[Path, Span]]:
    """Return all spans, each once: exporters that try again write one twice."""
    seen: dict[tuple[str, str], Span] = {}
    found = []
    for path in paths:
        for span in read_spans(path):
            before = seen.setdefault((span.trace, span.id), span)
            if before is span:
                found.append((path, span))
            elif replace(before, at=span.at) != span:
                raise TraceError(f"two spans of trace {shown(span.trace)} have the id {shown(span.id)}", file=str(path), key=span.at)
    return found


def _check_times(path: Path, span: Span) -> None:
    if span.end_ns < span.start_ns:
        raise TraceError(
            f"span {shown(span.id)} ends {_seconds(span.start_ns - span.end_ns)} s before it starts", file=str(path), key=span.at
        )
    if span.end_ns - span.start_ns > LONGEST_S * NANO:
        raise TraceError(f"span {shown(span.id)} takes more than {LONGEST_S} s", file=str(path), key=span.at)


def _trajectory_of(path: Path, span: Span, attribute: str | None, rules: Rules) -> str:
    if attribute is None:
        return span.trace
    value = span.attributes.get(attribute)
    if not value and rules.action_of(span) is not None:
        raise TraceError(f"span {shown(span.id)} is a tool call without the attribute {attribute}", file=str(path), key=span.at)
    return value or ""  # spans that are no tool calls may be without: they are of no trajectory


def _is_tool_call(span: Span) -> bool:
    return span.attributes.get(OPERATION) == TOOL_CALL


def _containers(calls: Sequence[Span], spans: Sequence[Span]) -> set[tuple[str, str]]:
    parents = {(span.trace, span.id): span.parent for span in spans}
    found: set[tuple[str, str]] = set()
    for call in calls:
        above = (call.trace, call.parent)
        while above in parents and above not in found:
            found.add(above)
            above = (call.trace, parents[above])
    return found


def _trajectory(name: str, spans: Sequence[Span], calls: Sequence[Span], first_ns: int, rules: Rules) -> Trajectory:
    arrival_ns = min(span.start_ns for span in spans)
    until_ns = arrival_ns
    steps = []
    for together in _together(sorted(calls, key=lambda span: (span.start_ns, span.end_ns, span.id))):
        think_s = _seconds(max(0, together[0].start_ns - until_ns))
        steps.append({"think_s": think_s, "actions": [_action(span, rules) for span in together]})
        until_ns = max(until_ns, *(span.end_ns for span in together))
    job = next((span.attributes[JOB_ATTRIBUTE] for span in calls if JOB_ATTRIBUTE in span.attributes), JOB)
    line = {
        "schema": SCHEMA,
        "job": _printable(job) or JOB,
        "trajectory": _printable(name) or "unnamed",
        "arrival_s": _seconds(arrival_ns - first_ns),
        "steps": steps,
    }
    try:
        return parse_trajectory(json.dumps(line), rules.header)
    except TraceError as error:
        raise TraceError(f"trajectory {shown(name)}: {error}") from None


def _together(calls: Sequence[Span]) -> Iterator[list[Span]]:
    """Divide tool calls, by their start, into those that all overlap each other."""
    group: list[Span] = []
    for call in calls:
        if group and call.start_ns >= min(each.end_ns for each in group):
            yield group
            group = []
        group.append(call)
    if group:
        yield group


def _action(span: Span, rules: Rules) -> dict[str, Any]:
    took_s = _seconds(span.end_ns - span.start_ns)
    name = _printable(span.attributes.get(TOOL, span.name))
    return {**({"class": name} if name else {}), **(rules.action_of(span) or {}), "work_s": took_s, "observed_s": took_s}


def _with_free_names(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Tell apart the names that are the same once what cannot be printed is left out."""
    taken: dict[tuple[str, str], int] = {}
    for each in sorted(trajectories, key=lambda one: one.arrival_s):
        count = taken[each.job, each.trajectory] = taken.get((each.job, each.trajectory), 0) + 1
        yield each if count == 1 else replace(each, trajectory=f"{each.trajectory}#{count}")


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / NANO, 6)


def _printable(text: str) -> str:
    return "".join(each for each in text if each.isprintable())[:LONGEST_NAME]


def read_rules(path: Path) -> Rules:
    """Read a file of rules. Raises `TraceError`, which names file and key."""
    try:
        return _rules(read_toml(path))
    except TraceError as error:
        raise error.at(str(path)) from None


def _rules(content: Mapping[str, Any]) -> Rules:
    unknown = sorted(set(content) - {"rules", "services", "quotas"})
    if unknown:
        raise TraceError("is none of rules, services, quotas", key=unknown[0])
    declared = {key: content[key] for key in ("services", "quotas") if key in content}
    header = parse_header(json.dumps({"schema": SCHEMA, **declared}, default=str))
    listed = content.get("rules")
    if not isinstance(listed, list) or not listed or not all(isinstance(rule, dict) for rule in listed):
        raise TraceError("should be tables, one for each kind of tool call: [[rules]]", key="rules")
    return Rules(tuple(_rule(index, rule, header) for index, rule in enumerate(listed)), header)


def _rule(index: int, rule: Mapping[str, Any], header: Trace) -> Rule:
    action = {key: value for key, value in rule.items() if key not in ("tool", "span")}
    patterns = [rule.get(key) for key in ("tool", "span")]
    if all(pattern is None for pattern in patterns) or not all(pattern is None or isinstance(pattern, str) for pattern in patterns):
        raise TraceError("should have tool or span, a pattern of names", key=f"rules[{index}]")
    tried = {"schema": SCHEMA, "trajectory": "tried", "steps": [{"action": {"work_s": 0.0, **action}}]}
    try:
        parse_trajectory(json.dumps(tried, default=str), header)
    except TraceError as error:
        raise TraceError(error.problem, key=f"rules[{index}].{error.key.removeprefix('steps[0].action').lstrip('.')}") from None
    return Rule(patterns[0], patterns[1], action)
