"""The scheduler's figures at the end of a live replay."""

from __future__ import annotations

from itertools import count

import pytest
from redis import Redis

from app.broker.memory_store import MemoryBroker, MemoryStore
from app.replay.replay_command import figures_after
from app.scheduler_document import show_scheduler


def test_they_are_those_of_the_next_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an idle scheduler that has not shown yet what was done last, and shows it before somebody looks for the second time
    broker, looks = MemoryBroker(), count()
    store: Redis = MemoryStore(broker)  # type: ignore[assignment]
    show_scheduler(store, 0, 1, {"running": 0, "resizes": 1})

    def called(operation: str, _: str) -> None:
        if operation == "get" and next(looks) == 1:
            show_scheduler(store, 0, 1, {"running": 0, "resizes": 4})

    monkeypatch.setattr(broker, "called", called)
    # Then it is in the figures
    assert figures_after(store, shards=1)["resizes"] == 4
