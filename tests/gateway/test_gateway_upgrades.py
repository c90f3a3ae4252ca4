"""Requests that would rather speak another protocol, on the protocol that the gateway's server uses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

import uvicorn
from uvicorn.server import ServerState

from app.gateway.connection_limits import BoundedHeads

WISH = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"
"""What Java's client sends on a new connection."""
BODY = "GET /smuggled HTTP/1.1\r\n\r\n"
LENGTH = f"Content-Length: {len(BODY)}\r\n\r\n"
REQUESTS = {
    "alone": [f"{WISH}\r\n{LENGTH}{BODY}"],
    "body apart": [f"{WISH}\r\n{LENGTH}", BODY],
    "bytewise": [*f"{WISH}\r\n{LENGTH}{BODY}"],
    "chunked": [f"{WISH}\r\nTransfer-Encoding: chunked\r\n\r\n", f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"],
    "two lines": [f"Connection: Upgrade\r\nConnection: keep-alive\r\nUpgrade: h2c\r\n{LENGTH}", BODY],
    "to a proxy": [f"Proxy-Connection: upgrade\r\nUpgrade: websocket\r\n{LENGTH}", BODY],
}


@pytest.mark.parametrize("pieces", REQUESTS.values(), ids=REQUESTS)
async def test_a_request_that_would_rather_speak_another_protocol_is_served_whole(pieces: list[str]) -> None:
    served = list[tuple[str, bytes, bytes]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        served.append((scope["path"], dict(scope["headers"]).get(b"upgrade", b""), body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedHeads(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0)
    async with server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        # Given one that comes before the answer to another, also piece by piece, and another one that is the last
        first, *rest = pieces
        for piece in (f"PUT /first HTTP/1.1\r\n{LENGTH}{BODY}PUT /wishes HTTP/1.1\r\n{first}", *rest):
            writer.write(piece.encode())
            await asyncio.sleep(0)
        writer.write(f"PUT /last HTTP/1.1\r\nConnection: Upgrade, close\r\nUpgrade: x\r\n{LENGTH}{BODY}".encode())
        assert (await reader.read()).count(b"HTTP/1.1 204") == 3
        writer.close()
    body, wish = BODY.encode(), b"websocket" if "websocket" in pieces[0] else b"h2c"
    assert served == [("/first", b"", body), ("/wishes", wish, body), ("/last", b"x", body)]
