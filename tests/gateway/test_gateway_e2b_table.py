"""Processes of E2B's sandboxes as one copy of the gateway sees them while it takes note of an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

from redis.asyncio import Redis

from app.gateway.e2b_table import ENDED_S, Process, Program, Table, Tables
from app.gateway.records import KEPT_S, PROCESSES_PREFIX, SHELLS_PREFIX, Record, Records, record_key

NO_JOURNAL: Any = None
"""Nothing here is lost, so nothing asks the journal."""

PROGRAM = Program(cmd="/bin/sh", started_at=1.0, word="w")


def sandbox(name: str, **fields: Any) -> Record:
    base = {"state": "open", "job": "j", "trajectory": "t", "open_id": "o", "created_at": 1.0, "access_token": "key"}
    return Record.model_validate({"id": name, **base, **fields})


async def begin(table: Table, **fields: Any) -> Process:
    _, process = await table.begin(PROGRAM.model_copy(update=fields), "key")
    assert process is not None
    return process


@pytest.mark.parametrize(("state", "token"), [("opening", "key"), ("open", "other"), ("open", ""), (None, "key")])
async def test_nothing_begins_for_a_wrong_token_or_in_a_sandbox_that_is_not_open(empty_store: Redis, state: str | None, token: str) -> None:
    tables, record = Tables(empty_store), sandbox("env-1", state=state) if state else None
    if record:
        await Records(empty_store, NO_JOURNAL).enter(record)
    assert await tables.of("env-1").begin(PROGRAM, token) == (record, None)
    assert await tables.of("env-1").all() == []


async def test_what_goes_with_the_record_is_kept_as_long_as_it(empty_store: Redis) -> None:
    await Records(empty_store, NO_JOURNAL).enter(sandbox("env-1"))
    await empty_store.hset(SHELLS_PREFIX + "env-1", "name", "session")
    for key in (record_key("env-1"), SHELLS_PREFIX + "env-1"):
        await empty_store.expire(key, 100)
    await begin(Tables(empty_store).of("env-1"))
    # Then the shells that another shape has there live on, too
    kept = [await empty_store.ttl(key) for key in (record_key("env-1"), SHELLS_PREFIX + "env-1", PROCESSES_PREFIX + "env-1")]
    assert min(kept) > KEPT_S - 60


async def test_a_process_whose_end_is_known_is_found_no_more(empty_store: Redis) -> None:
    tables = Tables(empty_store)
    for name in ("env-1", "env-2"):
        await Records(empty_store, NO_JOURNAL).enter(sandbox(name))
    table = tables.of("env-1")
    process = await begin(table)
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
    asked = [asyncio.ensure_future(call) for call in (table.find(process.pid), table.all(), begin(table))]
    assert (await begin(tables.of("env-2"))).session == 0
    assert not any(call.done() for call in asked)
    is_made.set()
    await removing
    found, listed, begun = await asyncio.gather(*asked)
    assert found is None and process not in listed and begun.session == process.session
    assert tables.removing == {}


async def test_a_process_that_has_ended_is_found_by_number_and_tag_for_a_time(empty_store: Redis) -> None:
    await Records(empty_store, NO_JOURNAL).enter(sandbox("env-1"))
    table, other = (Tables(empty_store).of(name) for name in ("env-1", "env-2"))
    first, second = [await begin(table, tag="server") for _ in range(2)]
    await table.end(first)
    await table.end(second)
    # When the end of the first is noted once more, as by somebody who has joined it
    await table.end(first)
    # Then the tag is that of the second still, in its sandbox alone
    found = [await table.ended(first.pid, ""), await table.ended(0, "server"), await other.ended(first.pid, "")]
    assert found == [first, second, None]
    assert {await empty_store.ttl(key) for key in await empty_store.keys("tangram-gw-e2b-ended-*")} <= set(range(ENDED_S + 1))
    # And one that never ran is not found
    never = await begin(table)
    await table.remove(never)
    assert await table.ended(never.pid, "") is None
