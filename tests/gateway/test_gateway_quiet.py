"""Connections of which nothing comes, on the protocol that the gateway's server uses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

import uvicorn
from uvicorn.server import ServerState

from app.gateway.connection_limits import BoundedHeads

HEAD = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
LARGE = 1 << 20


class Loop(asyncio.SelectorEventLoop):
    """A loop whose clock goes on only where a test moves it."""

    now = 0.0

    def time(self) -> float:
        return self.now


class Noted(BoundedHeads):
    """A connection that notes how many bytes have come."""

    bytes_received = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.bytes_received += len(data)


def test_only_callers_whose_turn_it_is_may_not_be_silent_for_long() -> None:
    async def exchanged(loop: Loop) -> None:
        release, served = asyncio.Event(), list[Noted]()

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            await release.wait()
            while message.get("more_body"):
                message = await receive()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()

        def serve() -> Noted:
            served.append(Noted(config=config, server_state=ServerState(), app_state={}))
            return served[-1]

        server = await loop.create_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def come(connection: int, count: int) -> None:
            """Let the loop go on until so many bytes have come, or this end takes no more for now."""
            while len(served) <= connection or not (served[connection].bytes_received >= count or served[connection].flow.read_paused):
                await asyncio.sleep(0)

        async def connected(data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            await come(len(callers), len(data))
            return reader, writer

        callers = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
        # Given callers that send nothing, a part of a head, and a part of a body;
        # and one that has sent all, one that still sends, and one whose body is more than this end takes for now
        bodies = (HEAD % 9 + b"1234", HEAD % 1 + b"1", HEAD % 6, HEAD % LARGE + b"x" * LARGE)
        for data in (b"", b"POST / HT", *bodies):
            callers.append(await connected(data))
        held, (_, dripping) = served[5], callers[4]
        assert held.flow.read_paused

        async def pass_by(time_s: float) -> list[bool]:
            """Let time go by in which one more byte comes from the slow caller; return whose connections are closed."""
            loop.now += time_s
            dripping.write(b"1")
            await come(4, served[4].bytes_received + 1)
            return [connection.transport.is_closing() for connection in served]

        # When time goes by, then those are closed of which the head is missing, and later the one of which the body is
        assert await pass_by(BoundedHeads.quiet_s) == [True, True, False, False, False, False]
        for _ in range(4):
            closed = await pass_by(BoundedHeads.quiet_body_s / 2)
        assert closed == [True, True, True, False, False, False]
        assert [await reader.read() for reader, _ in callers[:3]] == [b"", b"", b""]
        # And the others are answered, although more time has gone by
        await pass_by(1.0)
        release.set()
        for reader, _ in callers[3:]:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, writer in callers:
            writer.close()
        server.close()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(exchanged(runner.get_loop()))  # type: ignore[arg-type]
