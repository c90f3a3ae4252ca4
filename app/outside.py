"""A small HTTP server that stands for an outside API in demos and live replays.

| request | answer |
|---|---|
| `GET /search?q=words` | a few made-up hits, as JSON, after a tenth of a second |
| `GET /work?seconds=s` | an empty object after s seconds; replays APIs that were recorded as a duration only |
| `GET /limited?account=a&seconds=s&tokens=t` | the same, with t as `usage.total_tokens`; 429 beyond the limits of account a |
| `PUT /limits?account=a&rate=r&concurrency=c` | sets the limits of account a (`app/limiter.py`) |
| `GET /counts?account=a` | what has arrived at account a since it was last asked |
| `GET /stalls` | when this process stood still, if it is watched: the ends, on the clock of `/counts`, and the seconds |

`python -m app.outside` serves until its standard input ends, and says where on standard output; it is watched.
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

from app.limiter import Accounts

API_HOST = "127.0.0.1"
SEARCH_S = 0.1
LONGEST_WORK_S = 3600.0
RETRY_AFTER_S = 1
_WATCHED_EVERY_S, _STALL_S = 0.005, 0.025


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer a request."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if parts.path == "/search":
            words = query.get("q", [""])[0]
            time.sleep(SEARCH_S)
            hits = [{"title": f"{words}: {number}", "url": f"http://example.invalid/{number}"} for number in range(3)]
            self._answer(200, {"query": words, "hits": hits})
        elif parts.path == "/limited":
            self._limited(query)
        elif parts.path == "/counts":
            self._answer(200, self.server.accounts.of(_first(query, "account")).counts())
        elif parts.path == "/stalls":
            self._answer(200, list(self.server.stalls))
        elif parts.path == "/work":
            time.sleep(_seconds(query.get("seconds", ["0"])[0]))
            self._answer(200, {})
        else:
            self._answer(404, {"error": f"no such path: {parts.path}"})

    def do_PUT(self) -> None:
        """Set the limits of an account."""
        query = parse_qs(urlsplit(self.path).query)
        rate, concurrency = (_seconds(_first(query, name, "0")) for name in ("rate", "concurrency"))
        self.server.accounts.of(_first(query, "account")).allow(int(rate), int(concurrency))
        self._answer(200, {})

    def _limited(self, query: Mapping[str, list[str]]) -> None:
        account = self.server.accounts.of(_first(query, "account"))
        refused = account.enter(time.monotonic())
        if refused is not None:
            self._answer(429, {"error": refused}, {"Retry-After": str(RETRY_AFTER_S)})
            return
        try:
            time.sleep(_seconds(_first(query, "seconds", "0")))
        finally:
            account.leave()
        self._answer(200, {"usage": {"total_tokens": int(_seconds(_first(query, "tokens", "0")))}})

    def _answer(self, status: int, document: object, headers: Mapping[str, str] | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: the output belongs to the replay."""


def _first(query: Mapping[str, list[str]], name: str, default: str = "") -> str:
    return query.get(name, [default])[0]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WORK_S) if seconds == seconds else 0.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.stalls: list[tuple[float, float]] = []
        super().__init__((API_HOST, 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of callers that hang up; say everything else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class OutsideApi:
    """The server, on a free loopback port, for as long as its context lives."""

    def __init__(self) -> None:
        self._server = _Server()
        self._thread = threading.Thread(target=self._server.serve_forever, name="outside-api", daemon=True)

    @property
    def base_url(self) -> str:
        """Where it listens, without a trailing slash."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def watch(self) -> None:
        """Note from now on when this process stands still: what arrived meanwhile is counted when it goes on, all at once."""
        threading.Thread(target=self._watch, name="outside-stalls", daemon=True).start()

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_WATCHED_EVERY_S)
            now = time.monotonic()
            if now - before > _WATCHED_EVERY_S + _STALL_S:
                self._server.stalls.append((now, now - before))
            before = now

    def __enter__(self) -> Self:
        """Start listening."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


if __name__ == "__main__":
    with OutsideApi() as api:
        api.watch()
        print(api.base_url, flush=True)
        sys.stdin.read()
