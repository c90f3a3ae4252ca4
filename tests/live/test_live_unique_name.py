"""One name, one worker."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from app.broker.memory_store import MemoryBroker, MemoryStore
from app.services_file import ConfigError
from tangram.connection import open_store
from tangram.wire import NODE_KEY_PREFIX
from tests.conftest import RedisServer
from workers.unique_name import UniqueName

BEAT_S, LONG_S = 0.05, 60.0
"""A worker with long beats holds its name however late its thread is, and no beat is under way as it gives the name back."""


def named(store: MemoryStore, beat_s: float = BEAT_S) -> UniqueName:
    return UniqueName(store, "n", beat_s)  # type: ignore[arg-type]


def taken_and_given_back(name: UniqueName) -> None:
    name.take()
    name.release()


def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
    """Have a worker of a process of its own take the name, with the store `s`, and then do something."""
    imports = (
        "import time; from app.broker.memory_store import *; from workers.unique_name import UniqueName; s = MemoryStore(MemoryBroker())"
    )
    return subprocess.run([sys.executable, "-c", "; ".join((imports, *words))], capture_output=True, text=True, check=False)


class SlowStore(MemoryStore):
    """A store that a reader hears from only after five beats."""

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        time.sleep(5 * BEAT_S)
        return value


def test_a_second_worker_under_a_name_is_refused_while_the_first_beats() -> None:
    store = MemoryStore(MemoryBroker())
    first, second = (named(store, LONG_S) for _ in range(2))
    first.take()
    with pytest.raises(ConfigError, match="another worker is the node n, on .* process .*: name this one otherwise, by TANGRAM_NODE_NAME"):
        named(store).take()
    # And not any more once the first has left
    first.release()
    taken_and_given_back(second)
    assert store.get(NODE_KEY_PREFIX + "n") is None


def test_the_name_of_a_killed_worker_is_free_at_once_on_its_host_and_after_three_beats_elsewhere() -> None:
    store = MemoryStore(MemoryBroker())
    # Given a process that held the name, and is killed
    left = in_a_process("UniqueName(s, 'n', 9.0).take()", "print(s.get('tangram-node-n').decode())").stdout.strip()
    store.set(NODE_KEY_PREFIX + "n", left)
    # When the next worker comes up on its host; then it has the name, though the key would never expire
    taken_and_given_back(named(store, LONG_S))
    # And on another host once the key is over
    store.set(NODE_KEY_PREFIX + "n", f"elsewhere {left.partition(' ')[2]}", px=round(2 * BEAT_S * 1000))
    taken_and_given_back(named(store))


def test_a_worker_that_is_held_up_as_it_asks_is_not_refused_a_name_that_is_free_by_then() -> None:
    store = SlowStore(MemoryBroker())
    store.set(NODE_KEY_PREFIX + "n", "elsewhere 1 left", px=round(2 * BEAT_S * 1000))
    taken_and_given_back(named(store))


def test_a_worker_that_did_not_run_while_another_took_its_name_ends_at_once() -> None:
    done = in_a_process("UniqueName(s, 'n', 0.05).take()", "s.set('tangram-node-n', 'elsewhere 7 other')", "time.sleep(60)")
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "another worker is the node n, on elsewhere process 7: name this one otherwise, by TANGRAM_NODE_NAME",
    )


def test_a_worker_holds_and_gives_back_its_name_though_the_store_answers_with_nonsense() -> None:
    # Given a worker that beats with a store which answers with nonsense, of which redis-py makes no error of its own
    store, beats = MemoryStore(MemoryBroker()), threading.Semaphore(0)

    def nonsense(*_: object) -> None:
        beats.release()
        int("none")

    name = UniqueName(store, "n", BEAT_S, nonsense)  # type: ignore[arg-type]
    name.take()
    # Then it beats on, and can be ended
    assert all(beats.acquire(timeout=30) for _ in range(2))
    store.transaction = nonsense  # type: ignore[assignment, method-assign]
    name.release()


OTHER = "elsewhere 7 other"


class HeldUpStore(MemoryStore):
    """A store whose next reader is held up with its answer, once `is_armed`, until `goes_on`; meanwhile another has the name."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.is_armed, self.held_up, self.goes_on = False, threading.Event(), threading.Event()

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        if self.is_armed:
            self.is_armed = False
            self.set(key, OTHER)
            self.held_up.set()
            self.goes_on.wait()
        return value


def test_a_worker_that_is_held_up_as_it_beats_does_not_take_the_name_back() -> None:
    store = HeldUpStore(MemoryBroker())
    name = named(store)
    before = set(threading.enumerate())
    name.take()
    (holds,) = set(threading.enumerate()) - before
    # Given one that has read its own name, when another one takes it
    store.is_armed = True
    store.held_up.wait()
    name.release()
    # And it goes on
    store.goes_on.set()
    holds.join()
    # Then the name is the other's, for as long as that beats
    assert store.get(NODE_KEY_PREFIX + "n") in (OTHER.encode(), None)


def test_a_worker_whose_store_takes_nothing_more_ends_and_keeps_its_name(own_redis: RedisServer) -> None:
    with own_redis.client() as client, open_store(own_redis.result, 5.0) as store:
        name = UniqueName(store, "n", LONG_S)
        name.take()
        # Given a store that refuses to write, as it does with a full disk or without its replicas
        client.config_set("min-replicas-to-write", 1)
        # When the worker gives its name back; then that does not go on for ever
        releases = threading.Thread(target=name.release, daemon=True)
        releases.start()
        releases.join(30)
        assert not releases.is_alive()
        assert client.get(NODE_KEY_PREFIX + "n") is not None
