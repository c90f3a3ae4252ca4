"""One request and its answer over a connection to a server that nobody trusts.

The server is a program of the environment: it may answer nothing, anything, or without end. So h11 reads the answer, its head and its
body are bounded, and whoever waits does so on `Wait`. Redirects are not followed, bodies are not unpacked.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import h11

from tangram.requests import MOST_PORT, UNSENDABLE
from tangram.wire import MOST_BODY_BYTES
from workers.cpu.errors import NoAnswer, RequestUnusable
from workers.cpu.pace import Pace
from workers.cpu.ports.wait import READABLE, WRITABLE, Wait

MOST_STATUS = 599
"""The highest status that HTTP has (RFC 9110, section 15)."""

MOST_HEAD_BYTES = 64 * 1024
"""The most bytes of a status line with headers, or of the trailers."""

MOST_EVENTS = 50_000
"""The most pieces of an answer, such as chunks of a body. Each takes some 10 us."""

INTERIM_EVENTS = 10
"""How many pieces more an answer counts for that only announces another: no server has use for a thousand of these."""

_READ_BYTES = 256 * 1024

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request: `path` with its query, percent-encoded; `headers` without those that belong to the connection."""

    port: int
    method: str
    path: str
    headers: Headers = ()
    body: bytes = b""

    def __post_init__(self) -> None:
        """Refuse ports that nobody can listen on, and bodies beyond the limit."""
        if not isinstance(self.port, int) or not 0 < self.port <= MOST_PORT:
            raise RequestUnusable(f"port: must be a number from 1 to {MOST_PORT}, not {self.port!r:.40}")
        if len(self.body) > MOST_BODY_BYTES:
            raise RequestUnusable(f"body: has more than {MOST_BODY_BYTES} bytes, the most that passes in one piece")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An answer, with the headers that the server has sent, names in lower case."""

    status: int
    headers: Headers
    body: bytes


def exchange(connection: socket.socket, asked: HttpRequest, wait: Wait) -> HttpAnswer:
    """Send a request over a connection that does not block, and return the answer. The connection is used up.

    Raises `RequestUnusable` when the request cannot be written as HTTP; `NoAnswer` when what came is no HTTP, breaks off, or is larger or
    in more pieces than the bounds; `ActionCancelled` or `ActionTimedOut` as `Wait.until`.
    """
    reading = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST_HEAD_BYTES)
    unsent = memoryview(_written(reading, asked))
    answer: h11.Response | None = None
    body, events, pace = bytearray(), 0, Pace()
    try:
        while True:
            event = reading.next_event()
            events += event is not h11.NEED_DATA
            if events > MOST_EVENTS:
                raise NoAnswer(f"the answer of the server on port {asked.port} is in more than {MOST_EVENTS} pieces")
            if event is h11.NEED_DATA:
                pace.keep()
                unsent = _go_on(connection, reading, unsent, wait)
            elif isinstance(event, h11.Response):
                answer = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MOST_BODY_BYTES:
                    raise NoAnswer(f"the answer of the server on port {asked.port} has more than {MOST_BODY_BYTES} bytes")
            elif isinstance(event, h11.EndOfMessage) and answer is not None:
                return _read(answer, bytes(body))
            elif isinstance(event, h11.InformationalResponse):
                events += INTERIM_EVENTS
            else:
                raise NoAnswer(f"the server on port {asked.port} wants the connection for something else than HTTP")
    except h11.RemoteProtocolError as error:
        if answer is None and reading.trailing_data == (b"", True):
            raise NoAnswer(f"the server on port {asked.port} closed the connection without an answer") from error
        raise NoAnswer(f"the server on port {asked.port} did not answer as HTTP has it: {str(error)[:200]}") from error


def _written(connection: h11.Connection, asked: HttpRequest) -> bytes:
    headers = [*asked.headers]
    names = {name.lower() for name, _ in headers}
    if "host" not in names:
        headers.insert(0, ("Host", f"localhost:{asked.port}"))
    if asked.body or asked.method not in ("GET", "HEAD", "OPTIONS", "TRACE", "DELETE"):
        headers.append(("Content-Length", str(len(asked.body))))
    headers.append(("Connection", "close"))
    try:
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        written = [connection.send(h11.Request(method=asked.method, target=asked.path, headers=encoded))]
        if asked.body:
            written.append(connection.send(h11.Data(data=asked.body)))
        written.append(connection.send(h11.EndOfMessage()))
    except (h11.LocalProtocolError, UnicodeError) as error:
        raise RequestUnusable(f"the request cannot be written as HTTP: {error}") from error
    return b"".join(part for part in written if part)


def _go_on(connection: socket.socket, reading: h11.Connection, unsent: memoryview, wait: Wait) -> memoryview:
    """Send and receive what can be now; return what is still to be sent.

    A server may answer before it has read everything, and close: what it does not take is not sent, and its answer counts.
    """
    # Servers that write head and body apart would wait for a delayed acknowledgement between the two, 40 ms. The kernel forgets this soon.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    ready = wait.until(connection, READABLE | (WRITABLE if unsent else 0))
    if unsent and ready & ~READABLE:
        try:
            unsent = unsent[connection.send(unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the server reads no more
            unsent = memoryview(b"")
    if ready & ~WRITABLE:
        try:
            reading.receive_data(connection.recv(_READ_BYTES))
        except BlockingIOError:
            pass
        except OSError as error:
            raise NoAnswer(f"the server broke off its answer: {error.strerror}") from error
    return unsent


def _read(answer: h11.Response, body: bytes) -> HttpAnswer:
    """Return an answer. Raises `h11.RemoteProtocolError` for what h11 lets through, but no HTTP server could pass on."""
    if answer.status_code > MOST_STATUS:
        raise h11.RemoteProtocolError(f"there is no status {answer.status_code}")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
    for name, value in headers:
        if UNSENDABLE.search(value):
            raise h11.RemoteProtocolError(f"the header {name} has control characters")
    return HttpAnswer(status=answer.status_code, headers=headers, body=body)
