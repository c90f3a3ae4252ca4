"""What the shapes of one gateway process share, and how a route asks for it.

```python
@router.get("/things/{id}")
async def thing(id: str, caller: CallerOf, gateway: GatewayOf) -> ...:
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from sqlalchemy import Engine
from starlette.requests import Request

from app.gateway.e2b_table import Tables
from app.gateway.environments import Environments
from app.gateway.joined import JoinedRuns
from app.gateway.journal import Journal
from app.gateway.languages import read_languages
from app.gateway.records import Records
from app.gateway.sessions import Caller, Sessions
from app.gateway.tokens import Tokens, token_of
from app.metrics.exposition import make_registry, serve
from app.metrics.families import counter, histogram
from app.metrics.loop_lag import watch_loop
from tangram.connection import KEEPALIVE, LEAVE_REPLICAS, find_addresses, open_store, redis_url
from tangram.settings import Settings

STORE_CONNECTIONS = 32

_log = logging.getLogger(__name__)


class Gateway:
    """What the shapes work with; used in one event loop."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        """Connect to nothing yet.

        Raises `StackUnreachable` when there is no stack to connect to; `LanguagesFileError` when the file of languages cannot be used.
        """
        url = find_addresses(settings).result_url
        limits: dict[str, Any] = {"timeout": settings.connect_timeout_s, "socket_timeout": settings.connect_timeout_s}
        limits |= {**LEAVE_REPLICAS, "retry": Retry(NoBackoff(), 0)}
        if not redis_url(url).startswith("unix:"):
            limits |= KEEPALIVE
        pool = BlockingConnectionPool.from_url(redis_url(url), max_connections=STORE_CONNECTIONS, **limits)
        self.settings = settings
        self.store = AsyncRedis(connection_pool=pool)
        self.blob_store = open_store(url, settings.connect_timeout_s)
        self.tokens = Tokens(engine)
        self.journal = Journal(engine)
        self.sessions = Sessions(settings)
        self.records = Records(self.store, self.journal)
        self.tables = Tables(self.store)
        self.environments = Environments(self.records, self.journal)
        self.runs = JoinedRuns(self.store)
        self.languages = read_languages(settings.gateway_languages)
        self.registry = make_registry(settings, "gateway")
        self.infra_failed = counter("tangram_gateway_infra_failed_total", self.registry)

    async def caller(self, token: str) -> Caller:
        """Return the caller that a token stands for. Raises `Unauthorized`, `InfraFailed` and `StackUnreachable`."""
        return await self.sessions.caller(await self.tokens.job_of(token))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Do what a gateway does beside its calls, and close everything afterwards."""
        async with AsyncExitStack() as closing:  # each step is made whatever became of those before
            closing.callback(self.blob_store.close)
            closing.push_async_callback(self.store.aclose)
            closing.push_async_callback(self.sessions.close)
            closing.push_async_callback(self.environments.settle)
            closing.push_async_callback(self.runs.close)
            serve(self.settings, self.registry)
            lag = histogram("tangram_gateway_loop_lag_seconds", self.registry)
            for beside in (self.sessions.close_idle(), watch_loop(lag)):
                closing.push_async_callback(_cancelled, asyncio.create_task(beside))
            yield


async def _cancelled(task: asyncio.Task[None]) -> None:
    """End a task and wait for that; why one has failed before is logged."""
    task.cancel()
    (end,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(end, Exception):
        _log.error("a task of the gateway had failed", exc_info=end)


async def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway


async def caller_of(request: Request) -> Caller:
    """Return who calls, by the token of the request. Raises as `Gateway.caller`."""
    caller = await (await gateway_of(request)).caller(token_of(request.headers))
    request.state.job = caller.job
    return caller


GatewayOf = Annotated[Gateway, Depends(gateway_of)]
CallerOf = Annotated[Caller, Depends(caller_of)]
