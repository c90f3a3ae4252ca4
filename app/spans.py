"""OpenTelemetry spans of the scheduler and of workers, where `TANGRAM_OTEL=1` asks for them; `tangram/tracing.py` says which there are.

The scheduler's follow from the entries that it writes into its journal, so they carry the times of the journal. A scheduler that takes over
knows from the message of an unfinished action which trace it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from typing import Any

from celery import Task, signals
from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, set_span_in_context

from app.action_task import call_of
from scheduler.live.entries import ActionEnded, ActionGranted, ActionReceived, ActionRequeued, ActionResized, Entry, Journal, Unfinished
from scheduler.model import GrantFacts
from tangram.tracing import CARRIER, context_of, fail
from tangram.wire import ACTION_HEADER, GRANT_HEADER

SPAN_ATTRIBUTE = "tangram_span"


@dataclass(slots=True)
class Traced:
    """An unfinished action that belongs to a trace, waiting since `since` or holding the grant of a span."""

    context: Context
    attributes: dict[str, str]
    since: float
    grant: Span | None = None


class TracedJournal:
    """A journal whose entries make spans once it has them. An action without a context has none."""

    def __init__(self, journal: Journal, tracer: Tracer) -> None:
        self._journal = journal
        self._tracer = tracer
        self._known: dict[str, Traced] = {}

    def write(self, entries: Sequence[Entry]) -> None:
        """Commit `entries`, then make spans of them."""
        self._journal.write(entries)
        for entry in entries:
            self._trace(entry)

    def unfinished(self) -> Unfinished:
        """Load what had not ended."""
        unfinished = self._journal.unfinished()
        for action in unfinished.actions:
            self._receive(action.id, action.header, action.message, action.received_at)
            if action.grant is not None:
                self._grant(action.id, action.grant, action.granted_at or 0.0)
        return unfinished

    def has_ended(self, action_id: str) -> bool:
        """Ask the journal."""
        return self._journal.has_ended(action_id)

    def _trace(self, entry: Entry) -> None:
        match entry:
            case ActionReceived():
                self._receive(entry.id, entry.header, entry.message, entry.received_at)
            case ActionGranted():
                self._grant(entry.id, entry, entry.granted_at)
            case ActionResized() if (known := self._known.get(entry.id)) is not None and known.grant is not None:
                name = "preempted" if entry.background else "resized"
                known.grant.add_event(name, {"tangram.dop": entry.units}, _nanoseconds(entry.at))
            case ActionRequeued() if (known := self._known.get(entry.id)) is not None:
                if known.grant is not None:
                    fail(known.grant, "requeued", entry.reason)
                    known.grant.end(_nanoseconds(entry.at))
                known.grant, known.since = None, entry.at
            case ActionEnded() if (known := self._known.pop(entry.end.id, None)) is not None:
                self._end(known, entry)
            case _:
                pass

    def _receive(self, action_id: str, header: Mapping[str, Any], message: str, received_at: float) -> None:
        if f'"{CARRIER[0]}"' not in message:
            return
        context = context_of(json.loads(message).get("headers", {}))
        self._known[action_id] = Traced(context, _attributes(action_id, header), received_at)

    def _grant(self, action_id: str, grant: GrantFacts, granted_at: float) -> None:
        known = self._known.get(action_id)
        if known is None:
            return
        at = _nanoseconds(granted_at)
        waited = self._tracer.start_span("queue", known.context, attributes=known.attributes, start_time=_nanoseconds(known.since))
        waited.end(at)
        given: dict[str, str | int] = {"tangram.node": grant.node, "tangram.dop": grant.units, "tangram.attempt": grant.attempt}
        known.grant = self._tracer.start_span("grant", known.context, attributes={**known.attributes, **given}, start_time=at)

    def _end(self, known: Traced, entry: ActionEnded) -> None:
        at = _nanoseconds(entry.at)
        span = known.grant
        if span is None:
            span = self._tracer.start_span("queue", known.context, attributes=known.attributes, start_time=_nanoseconds(known.since))
        span.set_attribute("tangram.status", entry.end.status)
        if entry.end.status != "succeeded":
            fail(span, entry.end.cause or entry.end.status, entry.end.reason)
        span.end(at)


def trace_tasks(tracer: Tracer) -> None:
    """Have each message with a grant make a span in this worker, which is current while its task runs."""

    def began(task_id: str, task: Task, **_: Any) -> None:
        grant, header = task.request.get(GRANT_HEADER), task.request.get(ACTION_HEADER) or {}
        if grant is None or task.request.get(CARRIER[0]) is None:
            return
        context = context_of({name: task.request.get(name) for name in CARRIER})
        given = {"tangram.node": grant["node"], "tangram.dop": grant["units"], "tangram.attempt": grant["attempt"]}
        taken = {"messaging.operation.type": "process", "messaging.operation.name": "execute"}
        attributes = {**_attributes(task_id, header), **given, **taken}
        span = tracer.start_span("execute", context, SpanKind.CONSUMER, attributes)
        setattr(task.request, SPAN_ATTRIBUTE, (span, otel.attach(set_span_in_context(span, context))))

    def ended(task: Task, **_: Any) -> None:
        made: tuple[Span, Token[Context]] | None = getattr(task.request, SPAN_ATTRIBUTE, None)
        if made is None:
            return
        span, token = made
        otel.detach(token)
        call = call_of(task)
        if call is None:
            return  # the message came twice and was dropped, and so is its span
        span.set_attribute("tangram.status", call.status)
        if call.status != "succeeded":
            fail(span, call.status, call.reason)
        # The scheduler may have heard of the end by now, since that is told with the result.
        span.end(_nanoseconds(call.over_at))

    signals.task_prerun.connect(began, weak=False)
    signals.task_postrun.connect(ended, weak=False)


def _attributes(action_id: str, header: Mapping[str, Any]) -> dict[str, str]:
    words = {name: str(header.get(name) or "") for name in ("kind", "job", "trajectory")}
    named = {f"tangram.{name}": value for name, value in words.items() if value}
    return {"messaging.system": "celery", "messaging.message.id": action_id, **named}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
