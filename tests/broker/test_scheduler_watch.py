"""Where no scheduler leads, workers and clients say so in their logs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis import Redis

from app.broker.memory_store import MemoryBroker, MemoryStore
from app.scheduler_document import show_scheduler
from tangram.scheduler_watch import MISSED_S, SchedulerWatch
from tangram.shards import Loads, exchange_loads
from tangram.wire import LOAD_KEY, SHARDS_KEY, WireLoad, of_shard

BEAT_S = 2.0
LOAD: WireLoad = {
    **{"cores": 8, "labels": [], "kinds": [], "environments": 0, "opening": 0},
    **{"units": {"offered": {}, "held": {}}, "memory": {"offered": {}, "held": {}}},
}  # type: ignore[typeddict-item]


def of_worker(shard: int, shards: int) -> Callable[[Redis], None]:
    return SchedulerWatch(shard, shards, BEAT_S, "this node gets nothing to do").look


def of_client(shard: int, shards: int) -> Callable[[Redis], None]:
    return Loads(shards).look


@pytest.mark.parametrize(("made", "meanwhile"), [(of_worker, "this node gets nothing to do"), (of_client, "what is submitted waits")])
@pytest.mark.parametrize(("shard", "shards", "of"), [(0, 1, ""), (1, 2, " shard 1 of 2")])
def test_it_is_said_once_that_nobody_schedules_and_once_that_somebody_does_again(
    made: Callable[[int, int], Callable[[Redis], None]], meanwhile: str, shard: int, shards: int, of: str, caplog: pytest.LogCaptureFixture
) -> None:
    store: Redis = MemoryStore(MemoryBroker())  # type: ignore[assignment]
    look, mine = made(shard, shards), of_shard(LOAD_KEY, shard) if shards > 1 else SHARDS_KEY

    def appears(which: int) -> None:
        show_scheduler(store, which, shards, {})
        if shards > 1:
            exchange_loads(store, which, shards, LOAD)

    def looked(seconds: float) -> list[str]:
        caplog.clear()
        for _ in range(round(seconds / BEAT_S)):
            look(store)
        return caplog.messages

    # Given that other shards alone have a scheduler
    for other in range(shards):
        if other != shard:
            appears(other)
    assert looked(MISSED_S - BEAT_S) == []
    assert looked(BEAT_S) == [f"no scheduler leads{of}: {meanwhile} until one does"]
    assert looked(2 * MISSED_S) == []
    # When one leads here, and when it has died
    appears(shard)
    assert looked(MISSED_S) == [f"a scheduler leads{of} now"]
    store.delete(mine)
    assert looked(MISSED_S - BEAT_S) == []
    assert looked(BEAT_S) == [f"no scheduler leads{of}: {meanwhile} until one does"]
