"""The gateway's application, and the process that serves it.

| path | what |
|---|---|
| `/health` | 200 while the process answers; no token |
| `/ready` | 200 while tokens, records and a scheduler can be reached, else 503; no token |
| `/metrics` | figures of this process for Prometheus; no token |
| `/docs`, `/redoc`, `/openapi.json` | all routes |
| everything else | the shapes, `SHAPES` |
"""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from prometheus_client import generate_latest
from redis import RedisError
from starlette.exceptions import HTTPException

from app.gateway import (
    e2b_control,
    e2b_files,
    e2b_filesystem,
    e2b_process,
    e2b_templates,
    native,
    ports,
    rock,
    run_code,
    scores,
    services,
    swerex,
    teachers,
)
from app.gateway.access import Access
from app.gateway.connection_limits import BoundedHeads
from app.gateway.context import Gateway, GatewayOf
from app.gateway.reference import describe
from app.gateway.shape import CAUSE_HEADER, of_http
from app.journal.database import open_latest
from tangram.errors import StackUnreachable, TangramError
from tangram.settings import Settings

SHAPES: tuple[APIRouter, ...] = (
    e2b_process.router,
    swerex.router,
    rock.router,
    e2b_filesystem.router,
    e2b_files.router,
    native.router,
    ports.router,
    run_code.router,
    e2b_control.health_router,
    e2b_control.router,
    e2b_templates.router,
    *services.mounted(scores.router, teachers.router),
    scores.rewards,
)
"""The routers of all shapes, those with the most calls first. Where two know a path, the first one serves it."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When a connection whose other end does not answer is broken; whole seconds.

    A silent one is probed after `idle_s`, `probes` times, `interval_s` apart. One on which something was sent is broken when the other end
    has not confirmed it for as long as that takes in all.
    """

    idle_s: int = 30
    interval_s: int = 10
    probes: int = 3

    def options(self) -> list[tuple[str, int]]:
        """Return the options of a TCP socket."""
        whole_ms = 1000 * (self.idle_s + self.interval_s * self.probes)
        times = [("TCP_KEEPIDLE", self.idle_s), ("TCP_KEEPINTVL", self.interval_s), ("TCP_KEEPCNT", self.probes)]
        return [*times, ("TCP_USER_TIMEOUT", whole_ms)]


DRAIN_S = 10
"""Seconds that calls have for their end when the process is asked to end."""

_BACKLOG = 2048
_log = logging.getLogger(__name__)


def make_app(settings: Settings, database_url: str) -> FastAPI:
    """Return the application.

    Raises `DatabaseError` when the database cannot be reached, or is not up to date; what `Gateway` raises.
    """
    engine = open_latest(database_url, connect_timeout_s=settings.connect_timeout_s)
    gateway = Gateway(settings, engine)  # In `lifespan`, uvicorn would answer what this raises with a traceback.

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.gateway = gateway
        async with gateway.running():
            yield
        engine.dispose()

    app = FastAPIOffline(title="ARL-Tangram gateway", version="1", lifespan=lifespan)
    describe(app)
    app.add_middleware(ports.ByName)
    app.add_middleware(Access, body_limit_bytes=settings.gateway_body_mb * 2**20)
    app.add_exception_handler(HTTPException, _answer_http)
    for shape in (*SHAPES, _own):
        app.router.routes.extend(shape.routes)  # `include_router` would have each call pass through one more router
    return app


def serve(settings: Settings, database_url: str, host: str, port: int, keepalive: Keepalive = Keepalive()) -> None:
    """Serve until a signal asks for the end. Raises as `make_app`, and `OSError` where the port cannot be had."""
    app = make_app(settings, database_url)
    gc.freeze()  # The application lives as long as its process; walking it for garbage would hold up all calls.
    with _listen(host, port, keepalive) as listening:
        _log.info("the gateway serves http://%s:%d", *listening.getsockname()[:2])
        config = uvicorn.Config(
            app,
            http=BoundedHeads,
            access_log=False,
            log_config=None,
            lifespan="on",
            timeout_graceful_shutdown=DRAIN_S,
            timeout_keep_alive=75,
            server_header=False,
            proxy_headers=False,
            ws="none",
        )
        uvicorn.Server(config).run(sockets=[listening])


def _listen(host: str, port: int, keepalive: Keepalive) -> socket.socket:
    """Return a listening socket whose connections, which inherit its options, notice that their other end has vanished."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listening = socket.socket(family, kind, proto)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in keepalive.options():
            if hasattr(socket, name):  # macOS has other names
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


_own = APIRouter(tags=["gateway"])


@_own.get("/health")
@_own.head("/health", include_in_schema=False)
async def health() -> dict[str, str]:
    """Say that the process answers."""
    return {"status": "ok"}


@_own.get("/ready")
@_own.head("/ready", include_in_schema=False)
async def ready(gateway: GatewayOf) -> Response:
    """Say whether calls can be served now."""
    try:
        await gateway.store.ping()
        if not await gateway.journal.has_leader():
            raise StackUnreachable("no scheduler leads")
    except (TangramError, RedisError) as error:
        return JSONResponse({"status": "not ready", "reason": str(error)}, 503)
    return JSONResponse({"status": "ready"})


@_own.get("/metrics")
async def metrics(gateway: GatewayOf) -> Response:
    """Return figures of this process for Prometheus."""
    return Response(generate_latest(gateway.registry), media_type="text/plain; version=0.0.4")


async def _answer_http(request: Request, error: Exception) -> Response:
    """Answer for paths that nobody serves, in the forms that clients look for: FastAPI's, the gateway's own, and E2B's."""
    assert isinstance(error, HTTPException), "it is registered for these"
    message = f"{request.method} {request.url.path[:200]} is not served here"
    own = {"kind": of_http(error).kind, "message": message}
    content = {"detail": error.detail, "error": own, "code": error.status_code, "message": message}
    return JSONResponse(content, error.status_code, {**(error.headers or {}), CAUSE_HEADER: "bad_input"})
