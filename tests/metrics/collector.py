"""A collector of OpenTelemetry spans for tests: OTLP over HTTP, as protobuf."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from tests.serving import Quiet, serving


@dataclass
class Collector:
    """Where it listens, and the spans that have come so far, each with the name of the service that made it."""

    url: str = ""
    spans: list[tuple[str, Any]] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        """Take in one message."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = attributes(resource.resource)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]


def attributes(span: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Listen at a port of its own, and keep what comes."""
    collector = Collector()

    class Handler(Quiet):
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

    with serving(Handler) as port:
        collector.url = f"http://127.0.0.1:{port}"
        yield collector
