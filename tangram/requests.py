"""What an HTTP request to a server of an environment may be. Each check raises `InvalidAction`, which names the argument."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tangram.arguments import content, present
from tangram.errors import InvalidAction
from tangram.wire import MOST_BODY_BYTES

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
"""Headers of a request, as a mapping or, where names come several times, as pairs."""

OF_THE_CONNECTION: Final = frozenset(
    (
        *("connection", "content-length", "expect", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
"""Headers that hold for one connection, in lower case: whoever opens the next one writes its own."""

UNSENDABLE: Final = re.compile("[\0-\x08\x0a-\x1f\x7f]|[^\0-\xff]")
"""A character that the value of a header cannot have."""

MOST_PORT, MOST_PATH = 0xFFFF, 8000

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(r"/[!-~]*")


def request_arguments(port: int, path: str, method: str, headers: Headers | None, body: bytes | str | None) -> dict[str, Any]:
    """Return the arguments of a `cpu.request`."""
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= MOST_PORT:
        raise InvalidAction("port", f"must be a whole number from 1 to {MOST_PORT}, not {port!r:.40}")
    if not isinstance(path, str) or not _TARGET.fullmatch(path) or len(path) > MOST_PATH:
        raise InvalidAction("path", f"must begin with /, be percent-encoded, and have {MOST_PATH} characters at most, not {path!r:.80}")
    if not isinstance(method, str) or not _TOKEN.fullmatch(method) or method.upper() == "CONNECT":
        raise InvalidAction("method", f"must be an HTTP method other than CONNECT, not {method!r:.40}")
    return present(port=port, path=path, method=method, headers=_pairs(headers), body=_content(body))


def _pairs(headers: Headers | None) -> list[list[str]] | None:
    try:
        pairs = [(name, value) for name, value in (headers.items() if isinstance(headers, Mapping) else headers or ())]
    except (TypeError, ValueError):
        raise InvalidAction("headers", "must be a mapping of names to values, or pairs of them") from None
    for name, value in pairs:
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise InvalidAction("headers", f"{name!r:.40} is no name of a header")
        if name.lower() in OF_THE_CONNECTION:
            raise InvalidAction("headers", f"{name} belongs to the connection, which is not the caller's; upgrades are not served")
        if not isinstance(value, str) or UNSENDABLE.search(value):
            raise InvalidAction("headers", f"{name} must be a text of Latin-1 in one line")
    return [[name, value] for name, value in pairs] or None


def _content(body: bytes | str | None) -> bytes | None:
    whole = b"" if body is None else content("body", body)
    if len(whole) > MOST_BODY_BYTES:
        raise InvalidAction("body", f"must have at most {MOST_BODY_BYTES} bytes, not {len(whole)}")
    return whole or None
