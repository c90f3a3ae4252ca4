"""Figures of the client: what it asks of a caller's event loop, and how soon it says that something is not there."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from statistics import median

from redis import Redis

from app.local.redis_server import RedisServer
from bench.figures.registry import figure
from bench.tools import NotMeasured, until, wait_s
from tangram import Action, AsyncClient, Client, Settings, StackUnreachable
from tangram.wire import INGRESS_QUEUE

ALLOWED_S = 1.5
LARGE, SUBMITTED = 4_000_000, 20
ACTION = Action(kind="my.task")


@figure("%")
def client_loop_worked() -> float:
    """Return the CPU time of the event loop's thread while 20 actions with 4 MB each are sent, part of the time that this takes."""
    return 100 * _burst()[0]


@figure("%")
def client_loop_held() -> float:
    """Return the time that a caller spends in `submit` while 20 actions with 4 MB each are sent, part of the time that this takes."""
    return 100 * _burst()[1]


@figure("s")
def client_unreachable_told() -> float:
    """Return how long a client that may wait 1.5 s looks for a server that says nothing, the longest of two brokers and a result store."""
    with _redis() as server, socket.create_server(("127.0.0.1", 0)) as mute:
        here = f"127.0.0.1:{mute.getsockname()[1]}"
        stacks = [(f"redis://{here}/0", server.url), (f"amqp://guest:guest@{here}//", server.url), (server.url, f"redis://{here}/0")]
        all_of = [Settings(broker_url=broker, result_url=result, connect_timeout_s=ALLOWED_S) for broker, result in stacks]
        return max(wait_s(lambda settings=settings: _told(lambda: Client(settings=settings))) for settings in all_of)  # type: ignore[misc]


@figure("s")
def client_outage_told() -> float:
    """Return how long a client that may wait 1.5 s waits for an action after the broker went away."""
    with ExitStack() as ends:
        broker, store = (ends.enter_context(_redis()) for _ in range(2))
        settings = Settings(broker_url=broker.url, result_url=store.url, connect_timeout_s=ALLOWED_S)
        client = ends.enter_context(Client(settings=settings))
        broker.stop()
        handle = client.submit(ACTION)
        return wait_s(lambda: _told(lambda: handle.result(60)))


@figure("ms")
def client_close() -> float:
    """Return how long closing a client takes, median of 5."""
    with _redis() as server:
        took_s = []
        for _ in range(5):
            client = Client(settings=_settings(server))
            client.submit(ACTION)
            took_s.append(wait_s(client.close))
        return 1e3 * median(took_s)


@cache
def _burst() -> tuple[float, float]:
    """Submit large actions; return the parts of the time in which the loop's thread worked, and was held."""

    async def scenario(server: RedisServer) -> tuple[float, float]:
        held_s = worked_s = 0.0
        with Redis(unix_socket_path=str(server.socket)) as broker:
            async with AsyncClient(settings=_settings(server)) as client:
                began = time.perf_counter()
                for _ in range(SUBMITTED):
                    before, worked_before = time.perf_counter(), time.thread_time()
                    await client.submit(Action(kind="my.task", arguments={"data": b"x" * LARGE}))
                    held_s += time.perf_counter() - before
                    worked_s += time.thread_time() - worked_before
                await asyncio.to_thread(until, lambda: broker.llen(INGRESS_QUEUE) == SUBMITTED)
                whole_s = time.perf_counter() - began
        return worked_s / whole_s, held_s / whole_s

    with _redis() as server:
        return asyncio.run(scenario(server))


def _settings(server: RedisServer) -> Settings:
    return Settings(broker_url=server.url, result_url=server.url, connect_timeout_s=5.0)


@contextmanager
def _redis() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder:
        server = RedisServer(Path(folder), log=Path(folder) / "redis.log")
        try:
            yield server
        finally:
            server.stop()


def _told(call: Callable[[], object]) -> None:
    try:
        call()
    except StackUnreachable:
        return
    raise NotMeasured("the client does not say that it cannot reach the stack")
