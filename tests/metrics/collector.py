"""A collector of OpenTelemetry spans for tests: OTLP over HTTP, as protobuf."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class Collected:
    """One span, with the name of the service that made it; times are nanoseconds."""

    service: str
    trace: bytes
    id: bytes
    parent: bytes
    name: str
    kind: int
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]


class Collector:
    """Listens at a port of its own, and keeps what comes."""

    def __init__(self) -> None:
        self._spans: list[Collected] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, body: bytes) -> None:
        """Take in one message."""
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes)["service.name"]
                self._spans += [_read(service, span) for scope in resource.scope_spans for span in scope.spans]

    def spans(self) -> list[Collected]:
        """Return what has come so far."""
        with self._lock:
            return list(self._spans)


def _read(service: str, span: Any) -> Collected:
    return Collected(
        service=service,
        trace=span.trace_id,
        id=span.span_id,
        parent=span.parent_span_id,
        name=span.name,
        kind=span.kind,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == 2,
        attributes=_attributes(span.attributes),
        events=tuple(event.name for event in span.events),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
