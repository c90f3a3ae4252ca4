"""OpenTelemetry spans of actions, where `TANGRAM_OTEL=1` asks for them; else nothing is imported and nothing is done.

docs/metrics.md lists the spans. The context travels in the headers `traceparent` and `tracestate` of the message, as W3C describes them, so
a span that is current where an action is submitted becomes the parent of all. Where to send spans, and which, is said by OpenTelemetry's
own variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER` and so on). No span holds what an action was given or has printed.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from tangram.action import Action
from tangram.errors import ActionError, TangramError
from tangram.settings import Settings
from tangram.wire import INGRESS_QUEUE

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

CARRIER: Final = ("traceparent", "tracestate")
"""The headers of a message in which its context travels."""

EXIT_S: Final = 2.0
"""Time that the end of a process waits for its last spans to be sent."""


def tracer_of(settings: Settings, service: str) -> Tracer | None:
    """Return what makes spans in this process, None where they are off; `service` names the process where `OTEL_SERVICE_NAME` does not.

    Raises `TangramError` when they are on and OpenTelemetry is not installed.
    """
    if not settings.otel:
        return None
    try:
        return _tracer(service)
    except ModuleNotFoundError as error:
        raise TangramError(f"TANGRAM_OTEL needs {error.name}: pip install 'arl-tangram[otel]'") from error


@cache
def _tracer(service: str) -> Tracer:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):  # nobody in this process has set one up
        resource = Resource({SERVICE_NAME: service}).merge(OTELResourceDetector().detect())
        own, exporter = TracerProvider(resource=resource, shutdown_on_exit=False), OTLPSpanExporter()
        own.add_span_processor(BatchSpanProcessor(exporter))
        atexit.register(_send_rest, own, exporter)
        provider = own
    return provider.get_tracer("tangram")


def _send_rest(provider: TracerProvider, exporter: OTLPSpanExporter) -> None:
    """Send what is left when the process ends; a collector that is away holds that up for `EXIT_S` at most."""
    sending = threading.Thread(target=provider.shutdown, name="tangram-spans", daemon=True)
    sending.start()
    sending.join(EXIT_S)
    if sending.is_alive():
        exporter.shutdown()  # type: ignore[no-untyped-call]


def context_of(headers: Mapping[str, Any]) -> Context:
    """Return the context that a message came with."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: value for name in CARRIER if isinstance(value := headers.get(name), str)}
    return TraceContextTextMapPropagator().extract(carrier)


def fail(span: Span, error: str, reason: str) -> None:
    """Mark a span as failed: `error` is one word, `reason` a sentence."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR, reason))


class ActionSpan:
    """The spans of one action in its client. Each method is called once, by whichever thread gets there."""

    def __init__(self, tracer: Tracer, task_id: str, action: Action) -> None:
        """Begin, below the span that is current in this thread."""
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes = {
            "messaging.system": "celery",
            "messaging.message.id": task_id,
            "tangram.kind": action.kind,
            "tangram.job": action.job,
            "tangram.trajectory": action.trajectory,
        }
        self._tracer = tracer
        self._whole = tracer.start_span(f"action {action.kind}", attributes=attributes)
        self._context = set_span_in_context(self._whole)
        sending = {"messaging.operation.type": "send", "messaging.operation.name": "submit", "messaging.destination.name": INGRESS_QUEUE}
        self._submit = tracer.start_span("submit", self._context, SpanKind.PRODUCER, {**attributes, **sending})
        self._result: Span | None = None
        self.headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(self.headers, self._context)

    def sent(self) -> None:
        """Note that the broker has the message."""
        if self._submit.is_recording():  # its result may have been faster
            self._submit.end()

    def arrived(self) -> None:
        """Note that the result has come."""
        self._result = self._tracer.start_span("result", self._context)

    def ended(self, future: Future[Any]) -> None:
        """Note that the caller has the result."""
        if self._result is not None:
            self._result.end()
        if (error := future.exception()) is not None:
            status = error.status if isinstance(error, ActionError) else type(error).__name__
            self._whole.set_attribute("tangram.status", status)
            fail(self._whole, type(error).__name__, str(error))
        self.sent()
        self._whole.end()
