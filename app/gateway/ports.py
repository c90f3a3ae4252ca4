"""Ports of environments: HTTP requests to servers that run in them, each of which is one action.

A request names environment and port by a path, by headers, or by a host name (docs/gateway.md).

`ByName` turns the latter two into the first, before the routes are looked at: such a request may have any path. Methods, query, body and
all other headers are passed on, but for those that belong to a connection and those that are the gateway's. The answer comes back
likewise. An answer of the gateway's own has the header `Tangram-Cause`, which no server in an environment can set.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from fastapi import Header
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.gateway import calls
from app.gateway.context import Gateway, GatewayOf
from app.gateway.errors import BadRequest, GatewayError, NotFound, ProgramFailed, Unauthorized
from app.gateway.records import Record
from app.gateway.sessions import Caller
from app.gateway.shape import headers_of, plain_answer, shape_router
from app.gateway.tokens import token_of
from tangram import calls as words
from tangram.requests import MOST_PORT, OF_THE_CONNECTION
from tangram.results import HttpAnswer

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]

AGENTS = (49983, 49999)
"""The ports of E2B's own agent and of its code interpreter, whose calls are served as such, or not at all."""

TIMEOUT_HEADER = "tangram-timeout-s"

_OURS = ("x-api-key", "x-access-token", "host", "authorization")
_OUR_PREFIXES = ("e2b-", "tangram-")
_OF_THE_ADDRESS = frozenset(
    {"set-cookie", "strict-transport-security", "clear-site-data", "alt-svc", "accept-ch", "nel", "report-to", "public-key-pins"}
)
"""Headers of an answer that a browser keeps for its address, which is the gateway's where a port is named by path."""

_DOMAIN = re.compile(r";\s*domain\s*=[^;]*", re.IGNORECASE)
_READING = ("GET", "HEAD", "OPTIONS", "TRACE")
_ALONE = "sandbox allow-scripts allow-forms allow-popups"
"""A policy by which a browser takes a page for one of no origin: it is a program's, and the address is the gateway's."""

_NAMED = "tangram.named"
_PORT = re.compile(r"[0-9]{1,5}")
_HOST = re.compile(r"([0-9]{1,5})-(env-[0-9a-f]+)\.")
_WITH_STATUS = {"no_answer": 502, "timeout": 504}


@dataclass(frozen=True, slots=True)
class Named:
    """What a request names otherwise than by its path: an environment and a port, and whether as a host. `raw_path` is its own path."""

    environment: str
    port: int
    as_host: bool
    raw_path: bytes


class UpgradeRefused(GatewayError):
    """Raised for a request that wants its connection to speak something else, such as WebSocket."""

    status, kind, cause = 501, "not_served", "bad_input"


class PageRefused(GatewayError):
    """Raised for a request by which a page of another origin, such as a program's, would change something."""

    status, kind, cause = 403, "bad_request", "bad_input"


class ByName:
    """Middleware by which the port of an environment can be named in headers, or as a host.

    Whatever is the gateway's own, a page may change only if that page has the gateway's origin.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        request = Request(scope) if scope["type"] == "http" else None
        named = _named(request.headers, scope["raw_path"]) if request is not None else None
        if named is not None:
            path = f"/api/v1/environments/{named.environment}/ports/{named.port}"
            scope = {**scope, "path": path, "raw_path": path.encode(), _NAMED: named}
        if request is not None and (named is None or not named.as_host) and _is_of_another_page(request):
            refused = PageRefused("a page of another origin cannot ask for this")
            await plain_answer(request, refused)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_of_another_page(request: Request) -> bool:
    """Say whether a browser sends a request that may change something for a page of another origin. Other clients name none."""
    if request.method in _READING:
        return False
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


def _named(headers: Mapping[str, str], raw_path: bytes) -> Named | None:
    """Return what a request names otherwise than by its path; None where that is no port of an environment."""
    environment, port = headers.get("e2b-sandbox-id", ""), headers.get("e2b-sandbox-port", "")
    by_host = _HOST.match(headers.get("host", "").lower()) if not environment else None
    if by_host is not None:
        port, environment = by_host.groups()
    if not environment.replace("-", "").isalnum() or not _PORT.fullmatch(port) or int(port) in AGENTS:
        return None
    return Named(environment, int(port), by_host is not None, raw_path)


def answer_failed(request: Request, error: GatewayError) -> JSONResponse:
    """Answer a request that no server has answered."""
    if isinstance(error, ProgramFailed):
        error.status = _WITH_STATUS.get(error.cause, error.status)
    answer = plain_answer(request, error)
    if (named := request.scope.get(_NAMED)) is not None:
        content = {"sandboxId": named.environment, "port": named.port, "message": str(error), "code": error.status}
        return JSONResponse({**content, "cause": error.cause, "fault": error.fault}, error.status, headers_of(error))
    return answer


router = shape_router("ports", answer_failed, prefix="/api/v1", include_in_schema=False)


@router.api_route("/environments/{environment}/ports/{port}{path:path}", methods=METHODS)
async def ask(
    request: Request,
    environment: str,
    port: str,
    gateway: GatewayOf,
    key: Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=256)] = None,
) -> Response:
    """Have a server of an environment answer a request."""
    if request.headers.get("upgrade", "h2c").lower() != "h2c":
        raise UpgradeRefused("connections to ports of environments are not upgraded: no WebSocket, HTTP/1.1 requests alone")
    if not _PORT.fullmatch(port):
        raise BadRequest(f"port: must be a number from 1 to {MOST_PORT}, not {port[:40]!r}")
    record, caller = await _admitted(request, gateway, environment)
    action = words.request(
        record.place,
        int(port),
        _target(request),
        method=request.method,
        headers=await _passed_on(request, gateway),
        body=await request.body(),
        timeout_s=_timeout_s(request),
    )
    by_path = _NAMED not in request.scope
    answer: HttpAnswer = await calls.run(caller, action, key=key if by_path else None, request=request)
    return _answer(request, answer, alone=by_path)


async def _admitted(request: Request, gateway: Gateway, environment: str) -> tuple[Record, Caller]:
    """Return the environment of a request, and for whom it is asked: by the token of the environment, or by that of its job."""
    token = request.headers.get("x-access-token") or request.headers.get("e2b-traffic-access-token")
    if token:
        known = await gateway.records.read(environment)
        if known is None or known.state != "open":
            raise NotFound(f"environment {environment} is unknown: it was never opened, or was closed")
        if not secrets.compare_digest(token.encode(), known.access_token.encode()):
            raise Unauthorized("the token is not that of this environment")
        await gateway.tokens.check(known.job)
        caller = await gateway.sessions.caller(known.job)
    else:
        caller = await gateway.caller(token_of(request.headers))
    request.state.job = caller.job
    return await gateway.environments.get(caller, environment), caller


def _target(request: Request) -> str:
    """Return path and query as the client has written them."""
    named: Named | None = request.scope.get(_NAMED)
    raw, query = named.raw_path if named is not None else request.scope["raw_path"], request.scope["query_string"]
    if named is None:
        raw = b"/" + b"/".join(raw.split(b"/")[len(["", "api", "v1", "environments", "ID", "ports", "P"]) :])
    return bytes(raw + (b"?" + query if query else b"")).decode("latin-1")


async def _passed_on(request: Request, gateway: Gateway) -> list[tuple[str, str]]:
    """Return the headers that the server is to see."""
    by_path = _NAMED not in request.scope
    # A browser sends the same cookies to all that is asked by path.
    passed = [(name, value) for name, value in _onward(request.headers.items()) if not (by_path and name == "cookie")]
    named: Named | None = request.scope.get(_NAMED)
    if named is not None and named.as_host:
        passed.append(("host", request.headers["host"]))
    for value in request.headers.getlist("authorization"):
        if not await _is_ours(value, gateway):
            passed.append(("authorization", value))
    return passed


def _onward(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return headers without those of the connection, which `Connection` may name more of, and without the gateway's own.

    Names are in lower case.
    """
    headers = list(headers)
    named = {word.strip().lower() for name, value in headers if name == "connection" for word in value.split(",")}
    stay = named.union(OF_THE_CONNECTION, _OURS)
    return [(name, value) for name, value in headers if name not in stay and not name.startswith(_OUR_PREFIXES)]


async def _is_ours(authorization: str, gateway: Gateway) -> bool:
    """Say whether this is a token of a job."""
    try:
        await gateway.tokens.job_of(token_of({"authorization": authorization}))
    except Unauthorized:
        return False
    return True


def _timeout_s(request: Request) -> float | None:
    said = request.headers.get(TIMEOUT_HEADER)
    try:
        seconds = None if said is None else float(said)
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 < seconds < math.inf:
        raise BadRequest(f"{TIMEOUT_HEADER}: must be a number of seconds above 0, not {str(said)[:40]!r}")
    return seconds


def _answer(request: Request, answer: HttpAnswer, *, alone: bool) -> Response:
    """Return what a server has answered; it stands `alone` where its address does not tell it from the gateway."""
    response = Response(answer.body, answer.status)
    dropped = {"date", *_OF_THE_ADDRESS} if alone else {"date", "clear-site-data"}
    passed = [(name, value) for name, value in _onward(answer.headers) if name not in dropped]
    headers = [(name, _DOMAIN.sub("", value) if name == "set-cookie" else value) for name, value in passed]
    if request.method == "HEAD":
        headers += [("content-length", value) for value in (answer.header("content-length"),) if value.isdigit()]
    elif answer.status not in (204, 304):
        headers.append(("content-length", str(len(answer.body))))
    if alone:
        headers.append(("content-security-policy", _ALONE))
    response.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return response
