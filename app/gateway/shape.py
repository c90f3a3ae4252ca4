"""Routers of shapes: each has one function that says a failure in the words of its clients.

```python
router = shape_router("swerex", my_errors, prefix="/envs")
```

A handler of such a router raises `GatewayError` or lets a `TangramError` through, as do its dependencies. A body that does not fit its
model comes as `BadRequest`; with `keep_422` it is FastAPI's own answer. Failures of the system are counted by shape and cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from redis import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from app.gateway.errors import BadRequest, Cancelled, GatewayError, InfraFailed, NotFound, TooLarge, Unauthorized, classify
from tangram.errors import TangramError

OnError = Callable[[Request, GatewayError], Response]
_log = logging.getLogger(__name__)


def shape_router(shape: str, on_error: OnError, *, keep_422: bool = False, **options: Any) -> APIRouter:
    """Return a router for a shape, whose failures `on_error` turns into answers; `options` are those of `APIRouter`."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    return await handler(request)
                except RequestValidationError as error:
                    if keep_422:
                        raise
                    return on_error(request, BadRequest(_first(error)))
                except ClientDisconnect:
                    return on_error(request, Cancelled("the caller is gone"))
                except HTTPException as error:
                    return on_error(request, of_http(error))
                except (TangramError, RedisError) as error:
                    return on_error(request, counted(request, shape, classify(error)))
                except Exception as error:
                    _log.exception("%s %s", request.method, request.url.path)
                    return on_error(request, counted(request, shape, classify(error)))

            return guarded

    return APIRouter(route_class=Route, **options)


def counted(request: Request, shape: str, error: GatewayError) -> GatewayError:
    """Count a failure where it is the system's, and return it."""
    if isinstance(error, InfraFailed):
        request.app.state.gateway.metrics.infra_failed.labels(shape, error.cause).inc()
        _log.warning("%s: %s: %s", shape, error.cause, error)
    return error


def plain_answer(_request: Request, error: GatewayError) -> JSONResponse:
    """Return the gateway's own form of an error: `{"error": {"kind", "message"}}`."""
    return JSONResponse({"error": {"kind": error.kind, "message": str(error)}}, error.status, dict(error.headers))


def of_http(error: HTTPException) -> GatewayError:
    """Return what an error of FastAPI's own is for a caller."""
    known = {401: Unauthorized, 404: NotFound, 405: NotFound, 413: TooLarge}
    return known.get(error.status_code, BadRequest)(str(error.detail))


def _first(error: RequestValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(step) for step in first['loc'])}: {first['msg']}"
