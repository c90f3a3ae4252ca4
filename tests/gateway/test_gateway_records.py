"""Records of environments that the result store has lost: the gateway writes them again where the environment still stands."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")

from redis.asyncio import Redis

from app.gateway.errors import InfraFailed
from app.gateway.records import Record, Records, name_key
from app.journal.models import Environment

NAME = name_key("j", "name", "n")
RECORD = Record(
    id="env-1",
    job="j",
    trajectory="t",
    open_id="o",
    state="open",
    image="python:3.12",
    metadata={"task": "7"},
    variables={"A": "b"},
    names=(NAME,),
    created_at=1.0,
    lease_s=60.0,
    ends_at=100.0,
    access_token="key",
)


class Journal:
    """Which environments stand; away while `is_away`."""

    def __init__(self) -> None:
        self.standing_ids = {("j", "env-1")}
        self.is_away = False

    async def standing(self, job: str, environment: str) -> Environment | None:
        if self.is_away:
            raise InfraFailed("the journal cannot be read", "stack_unreachable")
        return Environment(trajectory="t", created_at=1.0, ends_at=200.0) if (job, environment) in self.standing_ids else None


async def opened(store: Any, journal: Journal) -> Records:
    records = Records(store, journal)  # type: ignore[arg-type]
    await records.enter(RECORD)
    assert await records.claim(NAME, RECORD) == RECORD.id
    return records


@pytest.mark.parametrize("way", ["id", "name", "list"])
async def test_a_record_that_the_store_has_lost_is_there_again_with_its_names(empty_store: Redis, way: str) -> None:
    journal = Journal()
    records = await opened(empty_store, journal)
    await empty_store.flushall()
    if way == "id":
        found = await records.read("env-1")
    elif way == "list":
        (found,) = await records.read_all(["env-1"])
    else:
        assert await records.id_of(NAME) == "env-1"
        found = await records.read("env-1")
    # Then it is all there, with the lease that the journal knows, for other processes, too
    assert found == RECORD.model_copy(update={"ends_at": 200.0})
    other = Records(empty_store, journal)  # type: ignore[arg-type]
    assert await other.read("env-1") == found
    assert await other.id_of(NAME) == "env-1"


async def test_a_name_whose_record_the_store_has_lost_is_not_given_to_another(empty_store: Redis) -> None:
    journal = Journal()
    records = await opened(empty_store, journal)
    other = RECORD.model_copy(update={"id": "env-2", "state": "opening"})
    await empty_store.flushall()
    await records.enter(other)
    assert await records.claim(NAME, other) == "env-1"
    # Until the environment that has it stands no longer
    await empty_store.flushall()
    journal.standing_ids.clear()
    assert await records.claim(NAME, other) == "env-2"


async def test_a_record_of_an_environment_that_stands_no_longer_is_gone(empty_store: Redis) -> None:
    journal = Journal()
    records = await opened(empty_store, journal)
    # Given an environment that another process has closed, and forgotten
    journal.standing_ids.clear()
    await Records(empty_store, journal).forget("env-1", (NAME,))  # type: ignore[arg-type]
    assert await records.read("env-1") is None
    assert await records.id_of(NAME) is None
    assert await records.read_all(["env-1"]) == []


async def test_without_the_journal_a_lost_record_is_an_outage_and_not_a_closed_environment(empty_store: Redis) -> None:
    journal = Journal()
    records = await opened(empty_store, journal)
    await empty_store.flushall()
    journal.is_away = True
    with pytest.raises(InfraFailed):
        await records.read("env-1")
    journal.is_away = False
    assert await records.read("env-1") is not None
