"""Spans as they lie in files: OpenTelemetry's OTLP as JSON, and plain lists of spans, to one kind of value.

What may live here: the forms in which spans are written down. What they mean is `spans.py`'s business. A file holds, as a whole or one to
a line:

| form | an object with | times |
|---|---|---|
| OTLP/JSON, as the Collector's file exporter writes it | `resourceSpans` | `startTimeUnixNano`, `endTimeUnixNano` |
| a span or a list of them, as SDKs print them | `trace_id`, also in `context` | `start_time`, `end_time`: RFC 3339, or s |

Sources: the OTLP specification (JSON protobuf encoding), the OTLP file exporter, `ReadableSpan.to_json` of the Python SDK.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from app.replay.trace_lines import AnyLine, TraceError, shown, unreadable, validated
from scheduler.model.copied import filled

NANO = 10**9

Attributes = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span.

    Times are in nanoseconds since 1970; `attributes` are those of its resource, with its own over them, as text; `at` is its place.
    """

    trace: str
    id: str
    parent: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    at: str


def _whole(value: object) -> object:
    # OTLP/JSON writes 64-bit numbers as text, as protobuf's JSON does.
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _nanoseconds(value: object) -> object:
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = datetime.min
        if moment.tzinfo is None:
            raise PydanticCustomError("time", "should be a time with its zone, such as 2026-01-31T12:00:00Z")
        return round(moment.timestamp() * NANO)
    return round(value * NANO) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e11 else value


Identifier = Annotated[str, Field(min_length=1, max_length=256)]
Nano = Annotated[int, BeforeValidator(_whole), Field(gt=0, lt=2**64)]
Moment = Annotated[int, BeforeValidator(_nanoseconds), Field(gt=0, lt=2**64)]


class _KeyValue(AnyLine):
    key: str
    value: dict[str, Any] = Field(default_factory=dict)


class _OtlpSpan(AnyLine):
    trace: Identifier = Field(alias="traceId")
    id: Identifier = Field(alias="spanId")
    parent: str = Field("", alias="parentSpanId")
    name: str = ""
    start_ns: Nano = Field(alias="startTimeUnixNano")
    end_ns: Nano = Field(alias="endTimeUnixNano")
    attributes: tuple[_KeyValue, ...] = ()


class _Scope(AnyLine):
    spans: tuple[_OtlpSpan, ...] = ()


class _Resource(AnyLine):
    attributes: tuple[_KeyValue, ...] = ()


class _OfResource(AnyLine):
    resource: _Resource = _Resource()
    scopes: tuple[_Scope, ...] = Field((), alias="scopeSpans")


class _Otlp(AnyLine):
    resources: tuple[_OfResource, ...] = Field(alias="resourceSpans")


class _PlainSpan(AnyLine):
    trace: Identifier = Field(validation_alias=AliasChoices("trace_id", AliasPath("context", "trace_id"), "traceId"))
    id: Identifier = Field(validation_alias=AliasChoices("span_id", AliasPath("context", "span_id"), "spanId"))
    parent: str | None = Field(None, validation_alias=AliasChoices("parent_id", "parent_span_id", "parentSpanId"))
    name: str = ""
    start_ns: Moment = Field(validation_alias=AliasChoices("start_time", "start"))
    end_ns: Moment = Field(validation_alias=AliasChoices("end_time", "end"))
    attributes: dict[str, Any] = Field(default_factory=dict)
    resource: dict[str, Any] = Field(default_factory=dict)


def read_spans(path: Path) -> Iterator[Span]:
    """Give the spans of a file. Raises `TraceError`, which names file, line and key."""
    for line, value in _values(path):
        try:
            yield from _spans(value)
        except TraceError as error:
            raise error.at(str(path), line) from None


def _values(path: Path) -> Iterator[tuple[int | None, object]]:
    """Give what a file holds: one JSON value, or one a line, with its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise unreadable(error, str(path)) from None
    try:
        yield None, json.loads(text)
        return
    except (ValueError, RecursionError):
        pass  # not one value, so one a line
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:  # Python reads no number of more than 4300 digits
                reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", "a number is too long")
                raise TraceError(f"not JSON: {reason}", file=str(path), line=number) from None


def _spans(value: object) -> Iterator[Span]:
    if isinstance(value, list):
        for index, one in enumerate(value):
            try:
                yield from _spans(one) if isinstance(one, dict) else _not_a_span(one)
            except TraceError as error:
                raise error.inside(f"[{index}]") from None
    elif isinstance(value, dict) and "resourceSpans" in value:
        yield from _otlp(value)
    elif isinstance(value, dict) and ("resourceMetrics" in value or "resourceLogs" in value):
        raise TraceError("holds metrics or logs, not spans")
    elif isinstance(value, dict):
        yield _plain(value)
    else:
        yield from _not_a_span(value)


def _not_a_span(value: object) -> Iterator[Span]:
    raise TraceError(f"should be a span, a list of spans or an object with resourceSpans, not {shown(value)}")


def _otlp(value: Mapping[str, object]) -> Iterator[Span]:
    for number, resource in enumerate(validated(_Otlp, json.dumps(value)).resources):
        shared = _texts({each.key: each.value for each in resource.resource.attributes})
        for place, scope in enumerate(resource.scopes):
            for index, span in enumerate(scope.spans):
                own = _texts({each.key: each.value for each in span.attributes})
                at = f"resourceSpans[{number}].scopeSpans[{place}].spans[{index}]"
                yield filled(Span, span, attributes={**shared, **own}, at=at)


def _plain(value: Mapping[str, object]) -> Span:
    span = validated(_PlainSpan, json.dumps(value))
    shared = span.resource.get("attributes")
    attributes = {**_texts(shared if isinstance(shared, dict) else {}), **_texts(span.attributes)}
    return filled(Span, span, parent=span.parent or "", attributes=attributes, at="")


def _texts(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes that are single values, as text; OTLP wraps each in an object that names its type."""
    found = {}
    for key, value in attributes.items():
        single = next(iter(value.values()), None) if isinstance(value, dict) and len(value) == 1 else value
        if isinstance(single, str | int | float):
            found[key] = str(single)
    return found
