"""Large values beside the messages."""

from __future__ import annotations

import inspect
import logging
import math
import os
import signal
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import ConnectionError, RedisError
from redis.client import Pipeline

from app.broker.memory_store import MemoryBroker, MemoryStore
from tangram import ActionFailed
from tangram.blobs import GROWING_MS, PART_BYTES, Blobs
from tangram.connection import open_store
from tangram.wire import BLOB_THRESHOLD_BYTES
from tests.freezing import freeze


@pytest.fixture
def store() -> Any:
    return MemoryStore(MemoryBroker())


@given(data=st.binary(max_size=200), text=st.text(max_size=200), value=st.lists(st.integers() | st.text(max_size=5), max_size=40))
def test_what_is_put_comes_back(data: bytes, text: str, value: list[Any]) -> None:
    # Given a threshold in the middle of the sizes
    blobs = Blobs(MemoryStore(MemoryBroker()), threshold_bytes=50)  # type: ignore[arg-type]
    assert blobs.get(blobs.put(data)) == data
    assert blobs.get_text(blobs.put_text(text)) == text
    assert blobs.get_json(blobs.put_json(value)) == value


def test_the_threshold_itself_stays_inline(store: Any) -> None:
    blobs = Blobs(store)
    assert isinstance(blobs.put(b"x" * BLOB_THRESHOLD_BYTES), str)
    assert isinstance(blobs.put(b"x" * (BLOB_THRESHOLD_BYTES + 1)), dict)
    assert isinstance(blobs.put_text("x" * BLOB_THRESHOLD_BYTES), str)
    assert isinstance(blobs.put_text("é" * (BLOB_THRESHOLD_BYTES // 2 + 1)), dict)


@pytest.mark.parametrize("value", [None, 5, "no base64!", {}, {"$blob": 1}, {"$blob": "celery-task-meta-1", "bytes": 1}])
def test_what_is_no_wire_form_is_refused_and_a_reference_reads_no_other_keys(store: Any, value: object) -> None:
    store.set("celery-task-meta-1", b"1")
    with pytest.raises(ActionFailed, match="not a blob reference" if isinstance(value, dict) else "."):
        Blobs(store).get(value)


@pytest.mark.parametrize("harm", ["nothing", "a part comes again", "the parts are gone"])
def test_a_large_value_goes_in_parts_and_is_there_once_it_is_whole(harm: str) -> None:
    # Given a value of three parts, which somebody reads under the same key
    data, seen, harms = os.urandom(2 * PART_BYTES + 5), list[bytes](), [harm, "nothing", "nothing"]

    def happen(operation: str, key: str) -> None:
        if operation != "strlen":
            return
        seen.append(blobs.get(before))
        match harms.pop() if harms else "nothing":
            case "a part comes again":
                store.setrange(key, 0, data[:PART_BYTES])
            case "the parts are gone":
                store.delete(key)

    store = MemoryStore(MemoryBroker(happen))
    blobs = Blobs(store, patience_s=60)  # type: ignore[arg-type]
    before = blobs.put(b"x" * 2 * BLOB_THRESHOLD_BYTES)
    after: Any = blobs.put(data, before)
    assert set(seen) == {b"x" * 2 * BLOB_THRESHOLD_BYTES} and after["$blob"] == before["$blob"]  # type: ignore[index]
    assert blobs.get(after) == data
    # And whatever else is there expires soon, and the value later
    assert all(0 < store.pttl(key) <= GROWING_MS for key in store.broker.keys("") if key != after["$blob"])
    assert store.pttl(after["$blob"]) > GROWING_MS


def test_parts_that_are_late_leave_nothing_for_good(own_redis: Any) -> None:
    # Given a real store, and a value of which a part is on its way for longer than its writer waits
    store = open_store(own_redis.result, 5.0)
    data, late = os.urandom(2 * PART_BYTES), list[Any]()
    blobs = Blobs(store)
    execute = Pipeline.execute

    def noted(pipeline: Pipeline, *args: Any, **kwargs: Any) -> Any:
        late.append(list(pipeline.command_stack))
        return execute(pipeline, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "execute", noted)
        reference = blobs.put(data)
    for commands in late:
        with store.pipeline() as pipeline:
            pipeline.command_stack = commands
            pipeline.execute()
    # Then the value is what it was, and the rest goes
    assert blobs.get(reference) == data
    assert all(store.pttl(key) > 0 for key in store.scan_iter())
    assert store.pttl(reference["$blob"]) > GROWING_MS  # type: ignore[index]
    store.connection_pool.disconnect()


def test_a_value_that_is_not_as_long_as_its_reference_says_is_lost(store: Any) -> None:
    reference: Any = Blobs(store).put(b"x" * 2 * BLOB_THRESHOLD_BYTES)
    store.set(reference["$blob"], b"x")
    with pytest.raises(ActionFailed, match=f"a large value has 1 bytes in the result store, not {2 * BLOB_THRESHOLD_BYTES}"):
        Blobs(store).get(reference)


def test_a_store_that_is_away_is_waited_for_where_there_is_patience(own_redis: Any) -> None:
    limit_s, data = 0.2, os.urandom(2 * BLOB_THRESHOLD_BYTES)
    store = open_store(own_redis.result, limit_s)
    patient = Blobs(store, patience_s=60)
    reference = patient.put(data)
    with ThreadPoolExecutor() as pool:
        # Given a store that accepts connections and does not answer
        freeze(own_redis.process.pid)
        with pytest.raises(RedisError):
            Blobs(store).get(reference)
        # When it is asked with patience for a value, and to keep one
        back, kept = pool.submit(patient.get, reference), pool.submit(patient.put, data)
        # Then both wait until it answers again
        assert not wait([back, kept], 2.5 * limit_s).done
        own_redis.process.send_signal(signal.SIGCONT)
        assert back.result(60) == data
        assert patient.get(kept.result(60)) == data
    store.connection_pool.disconnect()


class StoreAway(MemoryStore):
    """A store that is away for the first writers, and takes note of the memory that blobs use then: other threads use some, too."""

    def __init__(self, tries: int) -> None:
        super().__init__(MemoryBroker())
        self.tries, self.in_use = tries, list[int]()
        self.meanwhile: Callable[[], object] = lambda: None

    def set(self, *args: Any, **options: Any) -> bool | None:
        if self.tries:
            self.tries -= 1
            self.meanwhile()
            own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, inspect.getfile(Blobs))])
            self.in_use.append(sum(each.size for each in own.statistics("filename")))
            raise ConnectionError("it is away")
        return super().set(*args, **options)


def test_output_that_waits_for_the_store_is_in_memory_once_and_is_complained_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "tangram.blobs")
    store, printed = StoreAway(tries=0), "é€😀".encode() * 100_000
    blobs = Blobs(store, patience_s=math.inf)  # type: ignore[arg-type]
    monkeypatch.setattr(blobs._closing, "wait", (pauses := list[float]()).append)
    # Given a store that refuses writes as a command has printed much, and from which somebody else reads
    kept = blobs.put(b"x" * 2 * BLOB_THRESHOLD_BYTES)
    store.tries, store.meanwhile = 6, lambda: blobs.get(kept)
    tracemalloc.start()
    try:
        reference = blobs.put_printed(printed)
    finally:
        tracemalloc.stop()
    # Then nothing waits but what the caller has
    assert max(store.in_use) < len(printed) / 10
    assert blobs.get_text(reference) == printed.decode()
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    said = [record.getMessage() for record in caplog.records if record.name == "tangram.blobs"]
    assert said == ["the result store is away, large values wait for it: it is away"]


@given(printed=st.binary(max_size=200))
def test_what_is_printed_comes_back_as_text(printed: bytes) -> None:
    blobs = Blobs(MemoryStore(MemoryBroker()), threshold_bytes=50)  # type: ignore[arg-type]
    assert blobs.get_text(blobs.put_printed(printed)) == printed.decode(errors="replace")


def test_a_store_that_is_away_is_not_waited_for_once_blobs_are_closed(own_redis: Any) -> None:
    patient = Blobs(open_store(own_redis.result, 5.0), patience_s=60)
    reference = patient.put(os.urandom(2 * BLOB_THRESHOLD_BYTES))
    own_redis.stop()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(patient.get, reference)
        assert not wait([asked], 0.3).done
        patient.close()
        with pytest.raises(RedisError):
            asked.result(30)
