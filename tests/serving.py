"""An HTTP server that answers in threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """Prints nothing; what a test serves is a class below it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serving(handler: type[Quiet]) -> Iterator[int]:
    """Serve as long as the block lasts; give the port of 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
