"""Connections of which nothing comes, on the protocol that the gateway's server uses."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

import uvicorn
from uvicorn.server import ServerState

from app.gateway.connection_limits import BoundedHeads

HEAD = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
QUIET_S = 8.0


class Quick(BoundedHeads):
    quiet_s: ClassVar[float] = QUIET_S
    quiet_body_s: ClassVar[float] = QUIET_S


def test_only_callers_whose_turn_it_is_may_not_be_silent_for_long() -> None:
    async def exchanged() -> None:
        release, large = asyncio.Event(), 1 << 20

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            message = await receive()
            await release.wait()
            while message.get("more_body"):
                message = await receive()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Quick(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def connected(data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            return reader, writer

        # Given callers that send nothing, a part of a head, and a part of a body
        silent = [await connected(data) for data in (b"", b"POST / HT", HEAD % 9 + b"1234")]
        # And one that has sent all, one that still sends, and one whose body is more than this end takes for now
        patient, slow = await connected(HEAD % 1 + b"1"), await connected(HEAD % 6)
        held = await connected(HEAD % large + b"x" * large)

        async def drip() -> None:
            for _ in range(6):
                await asyncio.sleep(QUIET_S / 4)
                slow[1].write(b"1")

        dripping = asyncio.create_task(drip())
        # Then the first three are closed
        assert [await reader.read() for reader, _ in silent] == [b"", b"", b""]
        # And the others are answered, although more time has gone by
        await dripping
        release.set()
        for reader, _ in (patient, slow, held):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        for _, writer in (*silent, patient, slow, held):
            writer.close()
        server.close()

    asyncio.run(exchanged())
