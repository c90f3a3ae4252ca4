"""Fixtures: what an API worker sends requests with, and a server that notes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Quiet, serving
from workers.api.requests import Requests

Served = tuple[int, list[tuple[str, str | None]]]
"""The port of a server, and the paths and cookies of the requests that have arrived."""


class _Handler(Quiet):
    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Cookie")))
        self.send_response(302 if self.path == "/redirect" else 200)
        for name, value in {"Location": "/secret", "Set-Cookie": "who=me", "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def server() -> Iterator[Served]:
    """Run a server on loopback, which redirects /redirect."""
    seen: list[tuple[str, str | None]] = []
    with serving(type("Handler", (_Handler,), {"seen": seen})) as port:
        yield port, seen


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    yield requests
    requests.close()
