"""Processes of E2B's sandboxes as one copy of the gateway sees them while it takes note of an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

from redis.asyncio import Redis

from app.gateway.e2b_table import Program, Tables
from tests.conftest import RedisUrls

PROGRAM = Program(cmd="/bin/sh", started_at=1.0)


async def test_a_process_whose_end_is_known_is_found_no_more(redis_urls: RedisUrls) -> None:
    async with Redis(unix_socket_path=str(redis_urls.socket)) as store:
        tables = Tables(store)
        table = tables.of("env-1")
        process = await table.add(PROGRAM)
        assert await table.find(process.pid) == process
        # Given a removal that the store has not made yet
        is_made, made = asyncio.Event(), tables.remove

        async def remove(**words: Any) -> None:
            await is_made.wait()
            await made(**words)

        tables.remove = remove  # type: ignore[assignment]
        removing = asyncio.create_task(tables.of("env-1").remove(process))
        await asyncio.sleep(0)
        # When processes of its sandbox are asked for, or begun, then that waits for it; another sandbox does not
        asked = [asyncio.ensure_future(call) for call in (table.find(process.pid), table.all(), table.add(PROGRAM))]
        assert (await tables.of("env-2").add(PROGRAM)).session == 0
        assert not any(call.done() for call in asked)
        is_made.set()
        await removing
        found, listed, begun = await asyncio.gather(*asked)
        assert found is None and process not in listed and begun.session == process.session
        # And nothing waits for what is removed
        assert tables.leaving == {}
