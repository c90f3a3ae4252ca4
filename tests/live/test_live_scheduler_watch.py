"""A worker whose shard no scheduler leads says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.broker.memory_store import MemoryBroker, MemoryStore
from app.scheduler_document import SHOWN_TTL_S, show_scheduler
from tangram.settings import Settings
from tangram.wire import SCHEDULER_KEY, of_shard
from workers.scheduler_watch import MISSED_S, SchedulerWatch


@pytest.mark.parametrize(("shard", "shards", "of"), [(0, 1, ""), (1, 2, " shard 1 of 2")])
def test_a_worker_says_once_that_nobody_schedules_its_node_and_that_somebody_does_again(
    shard: int, shards: int, of: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store = MemoryStore(MemoryBroker())
    settings = Settings(shard=shard, shards=shards, beat_s=2.0, state_dir=tmp_path)
    watch = SchedulerWatch(store, settings)  # type: ignore[arg-type]

    def looked(seconds: float) -> list[str]:
        caplog.clear()
        for _ in range(round(seconds / settings.beat_s)):
            watch.look()
        return caplog.messages

    # Given that another shard alone has a scheduler, and then one whose scheduler has died
    show_scheduler(store, 1 - shard, 2, {})  # type: ignore[arg-type]
    assert looked(MISSED_S - 2.0) == []
    assert looked(2.0) == [f"no scheduler leads{of}: this node gets nothing to do until one does"]
    assert looked(2 * MISSED_S) == []
    show_scheduler(store, shard, shards, {})  # type: ignore[arg-type]
    assert looked(MISSED_S) == [f"a scheduler leads{of} now"]
    store.set(of_shard(SCHEDULER_KEY, shard), b"{}", ex=SHOWN_TTL_S - 20)
    assert looked(MISSED_S - 2.0) == []
    assert looked(2.0) == [f"no scheduler leads{of}: this node gets nothing to do until one does"]
