"""Routers of shapes: each has one function that says a failure in the words of its clients.

```python
router = shape_router("swerex", my_errors, prefix="/envs")
```

A handler of such a router raises `GatewayError` or lets a `TangramError` through, as do its dependencies. A body that does not fit its
model comes as `BadRequest`; with `keep_422` it is FastAPI's own answer. Failures of the system are counted by shape and cause.

FastAPI reads and parses a body before it looks at anything else. So a large one is preceded by a look at the token of its request.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from fastapi import APIRouter
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import PydanticSerializationError
from redis import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from app.gateway.errors import BadRequest, Cancelled, GatewayError, NotFound, TooLarge, Unauthorized, classify
from app.gateway.tokens import token_of
from tangram.errors import TangramError

CAUSE_HEADER = "Tangram-Cause"
"""What tells an answer of the gateway's own from one that a server in an environment has given."""

LARGE_BODY: Final = 64 << 10
"""Bytes of a body above which it is not read for a caller without a token that counts. A smaller one costs less than to look."""

OnError = Callable[[Request, GatewayError], Response]
TokenOf = Callable[[Mapping[str, str]], str]
_log = logging.getLogger(__name__)

_HALF_PAIR = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]|\xed[\xa0-\xbf]")
"""One half of a surrogate pair in JSON, escaped or not. Models write them, Python's parser takes them, and they have no UTF-8 form."""


def shape_router(shape: str, on_error: OnError, *, keep_422: bool = False, token_of: TokenOf = token_of, **options: Any) -> APIRouter:
    """Return a router for a shape, whose failures `on_error` turns into answers; `options` are those of `APIRouter`.

    `token_of` returns the token among the headers of a call whose body FastAPI parses. Raises `Unauthorized` where there is none.
    """

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler, parses = super().get_route_handler(), self.body_field is not None

            async def guarded(request: Request) -> Response:
                try:
                    if parses and may_be_large(request.headers):
                        await request.app.state.gateway.tokens.job_of(token_of(request.headers))
                    return await handler(request)
                except RequestValidationError as error:
                    return await _refused(request, error, on_error, keep_422=keep_422)
                except ClientDisconnect:
                    return on_error(request, Cancelled("the caller is gone"))
                except HTTPException as error:
                    return on_error(request, of_http(error))
                except (TangramError, RedisError) as error:
                    return on_error(request, counted(request, shape, classify(error)))
                except Exception as error:
                    body: bytes = getattr(request, "_body", b"")  # which is there once it was read as a whole
                    if isinstance(error, (UnicodeEncodeError, PydanticSerializationError)) and _HALF_PAIR.search(body):
                        return on_error(request, BadRequest("the body has half of a surrogate pair, which is no text in UTF-8"))
                    _log.exception("%s %s", request.method, request.url.path)
                    return on_error(request, counted(request, shape, classify(error)))

            return guarded

    return APIRouter(route_class=Route, **options)


def may_be_large(headers: Mapping[str, str]) -> bool:
    """Say whether the token of a request is to be known before its body is read."""
    length = headers.get("content-length", "")
    return int(length) > LARGE_BODY if length.isdigit() else "transfer-encoding" in headers


async def _refused(request: Request, error: RequestValidationError, on_error: OnError, *, keep_422: bool) -> Response:
    """Answer a body that does not fit its model."""
    if keep_422:
        try:
            return await request_validation_exception_handler(request, error)
        except ValueError:
            pass  # FastAPI repeats the body, and this one cannot be written as JSON: NaN, or half of a surrogate pair.
    return on_error(request, BadRequest(_first(error)))


def counted(request: Request, shape: str, error: GatewayError) -> GatewayError:
    """Count a failure where it is the system's, and return it."""
    if error.fault == "infrastructure":
        request.app.state.gateway.infra_failed.labels(shape, error.cause).inc()
        _log.warning("%s: %s: %r", shape, error.cause, str(error))  # quoted: a program may have chosen its words
    return error


def plain_answer(_request: Request, error: GatewayError) -> JSONResponse:
    """Return the gateway's own form of an error: `{"error": {"kind", "message", "cause", "fault"}}`."""
    content = {"kind": error.kind, "message": str(error), "cause": error.cause, "fault": error.fault}
    return JSONResponse({"error": content}, error.status, headers_of(error))


def headers_of(error: GatewayError) -> dict[str, str]:
    """Return the headers of an answer that says a failure."""
    return {**error.headers, CAUSE_HEADER: error.cause or "worker_failed"}


def of_http(error: HTTPException) -> GatewayError:
    """Return what an error of FastAPI's own is for a caller."""
    known = {401: Unauthorized, 404: NotFound, 405: NotFound, 413: TooLarge}
    return known.get(error.status_code, BadRequest)(str(error.detail))


def _first(error: RequestValidationError) -> str:
    first = error.errors()[0]
    text = f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
