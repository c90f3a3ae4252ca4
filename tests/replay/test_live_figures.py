"""The scheduler's figures at the end of a live replay."""

import threading

from redis import Redis

from app.broker.memory_store import MemoryBroker, MemoryStore
from app.replay.replay_command import figures_after
from app.scheduler_document import show_scheduler


def test_they_are_those_of_the_next_housekeeping() -> None:
    # Given an idle scheduler that has not shown yet what was done last
    store: Redis = MemoryStore(MemoryBroker())  # type: ignore[assignment]
    show_scheduler(store, 0, 1, {"running": 0, "resizes": 1})
    # When it shows that
    later = threading.Timer(0.2, show_scheduler, (store, 0, 1, {"running": 0, "resizes": 4}))
    later.start()
    # Then it is in the figures
    assert figures_after(store, shards=1)["resizes"] == 4
    later.join()
