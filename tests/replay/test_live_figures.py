"""The scheduler's figures at the end of a live replay."""

from __future__ import annotations

import time
from itertools import count

import pytest
from redis import Redis

from app.broker.memory_store import MemoryBroker, MemoryStore
from app.replay.replay_command import figures_after
from app.scheduler_document import show_scheduler


def test_they_are_those_of_the_next_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an idle scheduler that has not shown yet what was done last
    monkeypatch.setattr("app.replay.replay_command.NEXT_SHOWN_S", 60.0)
    broker, asked = MemoryBroker(), count()
    store: Redis = MemoryStore(broker)  # type: ignore[assignment]
    show_scheduler(store, 0, 1, {"running": 0, "resizes": 1})

    def called(operation: str, _: str) -> None:
        if operation in ("get", "pttl"):
            number = next(asked)
            if number == 1:
                time.sleep(0.02)  # the store answers late
            if number == 3:  # and the scheduler shows it in the middle of the second look
                show_scheduler(store, 0, 1, {"running": 0, "resizes": 4})

    monkeypatch.setattr(broker, "called", called)
    # Then it is in the figures
    assert figures_after(store, shards=1)["resizes"] == 4
