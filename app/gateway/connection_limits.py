"""Bounds what callers without a token can hold: the head of a request, and the time for which nothing of a request comes.

uvicorn's parser would keep any amount of headers in memory, and its timer runs between requests alone.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

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
        super().data_received(data)
        self._watch()
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
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
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of a request; what follows a chunked body is none."""
        if self._in_head:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        """Take note that the request has come as a whole."""
        self._is_whole = True
        super().on_message_complete()

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
