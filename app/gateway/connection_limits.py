"""Bounds what callers without a token can hold: the head of a request, and the time for which nothing of a request comes.

uvicorn's parser would keep any amount of headers in memory, and its timer runs between requests alone.

The parser also skips the body of a request that would rather speak another protocol, as Java's client does with HTTP/2 on each new
connection. Nothing is upgraded here, so the head of such a request is read once more, without that wish.
"""

from __future__ import annotations

import asyncio
import sys
from typing import ClassVar, Final

from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES: Final = 64 << 10
"""The most that a request line and its headers may take. What is read at once counts as a whole, so up to a read more may pass."""

_REFUSAL: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
    b"The head of a request may take %d bytes." % HEAD_BYTES
)


class BoundedHeads(HttpToolsProtocol):
    """A connection that is closed, with status 431, once the head of a request is longer than `HEAD_BYTES`.

    It is also closed where the head of a request, the first one included, has not come as a whole and nothing more of it comes for
    `quiet_s`. For a body the time is `quiet_body_s`, since a client may stream what a person types. While its request is served, or while
    this end does not take more, its caller may be silent for any time.
    """

    quiet_s: ClassVar[float] = 60.0
    quiet_body_s: ClassVar[float] = 600.0
    _in_head = True
    _is_whole = False
    _head_bytes = 0
    _quiet: asyncio.TimerHandle | None = None
    _data = b""
    """What is read now."""
    _wish: tuple[tuple[bytes, bytes], ...] = ()
    """The `Upgrade` headers of a head that is read again: the application sees them all the same."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        if self._quiet is not None:
            self._quiet.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the caller has sent."""
        self._data, read = data, b""
        while read is not self._data:  # a head that is to be read again replaces it
            read = self._data
            super().data_received(read)
        self._data = b""
        self._watch()
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(read)
            if self._head_bytes > HEAD_BYTES:
                self.transport.write(_REFUSAL)
                self.transport.close()

    def on_message_begin(self) -> None:
        """Begin with a request."""
        self._in_head, self._is_whole, self._head_bytes = True, False, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Go on with the body of a request."""
        self._in_head = False
        self.headers.extend(self._wish)
        self._wish = ()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of a request; what follows a chunked body is none."""
        if self._in_head:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        """Take note that the request has come as a whole."""
        self._is_whole = True
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Say whether a request wants another protocol by its headers."""
        return bool(self.parser.get_method() != b"CONNECT")

    def handle_websocket_upgrade(self) -> None:
        """Have a fresh parser read the head of such a request without the wish, and then what follows."""
        at: int = sys.exc_info()[1].args[0]  # type: ignore[union-attr] # it is called for an `HttpParserUpgrade`, which says where the head ends
        self._wish = tuple(header for header in self.headers if header[0] == b"upgrade")
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header not in self._wish]
        self._data = b"\r\n".join([*lines, b"", b""]) + self._data[at:]
        self.parser = HttpRequestParser(self)  # the other one reads nothing after `Connection: close`
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _watch(self) -> None:
        """Wait for more from now on, where it is the caller's turn."""
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        if not self.transport.is_closing() and (not self._is_whole or self.cycle is None or self.cycle.response_complete):
            in_body = not self._in_head and not self._is_whole
            self._quiet = self.loop.call_later(self.quiet_body_s if in_body else self.quiet_s, self._end_quiet)

    def _end_quiet(self) -> None:
        if self.flow.read_paused:
            self._watch()
        else:
            self.transport.close()
