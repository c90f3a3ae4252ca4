"""A small HTTP server that plays the outside APIs of a trace while it is replayed or recorded.

| request | answer |
|---|---|
| `GET /search?q=words` | a few made-up hits, as JSON, after a tenth of a second |
| `GET /work?seconds=s` | an empty object after s seconds, for calls of which a trace has only the duration |
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

API_HOST = "127.0.0.1"
SEARCH_S = 0.1
LONGEST_WORK_S = 3600.0


class OutsideHandler(BaseHTTPRequestHandler):
    """Answers requests."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer a request."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if parts.path == "/search":
            words = query.get("q", [""])[0]
            time.sleep(SEARCH_S)
            hits = [{"title": f"{words}: {number}", "url": f"http://example.invalid/{number}"} for number in range(3)]
            self.answer(200, {"query": words, "hits": hits})
        elif parts.path == "/work":
            time.sleep(as_seconds(query.get("seconds", ["0"])[0]))
            self.answer(200, {})
        else:
            self.answer(404, {"error": f"no such path: {parts.path}"})

    def answer(self, status: int, document: object, headers: Mapping[str, str] | None = None) -> None:
        """Send a JSON document."""
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the output belongs to the replay."""


def as_seconds(text: str) -> float:
    """Read a number between 0 and `LONGEST_WORK_S`; what is none is 0."""
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WORK_S) if seconds == seconds else 0.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Print what went wrong, unless the caller has hung up."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class OutsideApi:
    """The server, on a free loopback port, for as long as its context lives."""

    def __init__(self, handler: type[OutsideHandler] = OutsideHandler) -> None:
        self._server = _Server((API_HOST, 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="outside-api", daemon=True)

    @property
    def base_url(self) -> str:
        """Where it listens, without a trailing slash."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
