"""The live page's application, and the process that serves it.

| path | what |
|---|---|
| `/`, `/actions`, `/jobs/…`, `/environments`, `/services/…`, `/nodes/…`, `/health` | pages (`pages.py`) |
| `/machines`, `/machines/plan`, `/api/machines` | how many machines (`machines.py`) |
| `/events` | a server-sent event for each new look |
| `/api/overview`, `/api/timeline` | JSON (`feeds.py`) |
| `/actions/ID/cancel`, `/environments/ID/close` | what a person may do, with the token (`operations.py`) |
| `/nodes/NAME/drain`, `/nodes/NAME/undrain` | likewise |
| `/static/…` | style and scripts |
| `/ready` | 200 while the journal can be read, else 503 |

Names and reasons come from users, so templates escape everything, and the policy of every answer allows scripts of this server alone.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.journal.database import open_latest
from app.metrics import exposition
from app.metrics.families import histogram
from app.metrics.loop_lag import watch_loop
from app.web import feeds, machines, operations, pages
from app.web.operations import Actor
from app.web.pages import Pages
from app.web.shared_looks import Looks
from tangram.connection import find_addresses, open_store
from tangram.settings import Settings

_log = logging.getLogger(__name__)

DRAIN_S = 2
"""Seconds that open pages have when the process is asked to end: their browsers connect again."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def hosts_of(host: str) -> tuple[str, ...]:
    """Return the names under which a page at the address `host` answers: all, unless that is this machine's own.

    A site whose name resolves to 127.0.0.1 could otherwise have the browser of this machine read the page for it.
    """
    try:
        own = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        own = False
    # Releases of the middleware see the IPv6 address with brackets, without them, or what is before its first colon.
    return ("localhost", "127.0.0.1", "[::1]", "::1", "[", host.lower()) if own else ("*",)


def make_app(settings: Settings, database_url: str, hosts: Sequence[str] = ("*",)) -> FastAPI:
    """Return the application, which answers under the names `hosts`.

    Raises `DatabaseError` when the database cannot be reached, or is not up to date; `StackUnreachable` when there is no stack to connect
    to.
    """
    engine = open_latest(database_url, connect_timeout_s=settings.connect_timeout_s)
    store = open_store(find_addresses(settings).result_url, settings.connect_timeout_s)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        looks = Looks(engine, store, settings.shards)
        app.state.looks, app.state.pages = looks, Pages(looks, may_act=settings.web_token is not None)
        app.state.actor = Actor(settings, looks)
        app.state.last_hour = machines.LastHour(database_url)
        registry = exposition.make_registry(settings, "web")
        exposition.serve(settings, registry)
        lag = asyncio.create_task(watch_loop(histogram("tangram_web_loop_lag_seconds", registry)))
        yield
        lag.cancel()
        await app.state.actor.close()
        await app.state.last_hour.close()
        looks.close()
        engine.dispose()
        store.close()

    app = FastAPI(title="ARL-Tangram", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    app.add_middleware(Headers)
    app.mount("/static", StaticFiles(directory=Path(__file__).parent / "static"))
    for part in (feeds.router, operations.router, machines.router, pages.router):
        app.include_router(part)
    app.add_exception_handler(404, pages.not_found)
    app.add_exception_handler(RequestValidationError, pages.not_understood)
    return app


class Headers:
    """Adds the headers of `_HEADERS` to every answer. Streams pass it piece by piece."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


def serve(settings: Settings, database_url: str, host: str, port: int) -> None:
    """Serve until a signal asks for the end. Raises as `make_app`, and `OSError` where the port cannot be had."""
    app = make_app(settings, database_url, hosts_of(host))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, reuse_port=False) as listening:
        _log.info("the live page is at http://%s:%d", *listening.getsockname()[:2])
        config = uvicorn.Config(
            app, access_log=False, log_config=None, lifespan="on", timeout_graceful_shutdown=DRAIN_S, server_header=False
        )
        uvicorn.Server(config).run(sockets=[listening])
