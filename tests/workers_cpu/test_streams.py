"""What is published of a command's output, and what becomes of it while the result store is slow or away."""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tangram import Chunk, InvalidAction, StackUnreachable
from tangram.connection import open_store
from tangram.streams import OutputReader
from tangram.wire import OUTPUT_KEY_PREFIX, OUTPUT_TTL_S
from tests.conftest import RedisServer, RedisUrls
from workers.cpu.streams import BUFFER_BYTES, ENTRIES_AT_ONCE, ENTRY_BYTES, KEPT_BYTES, OutputStreams

from .support import until


@pytest.fixture
def store(redis_urls: RedisUrls) -> Iterator[Redis]:
    with open_store(redis_urls.result, 5.0) as store:
        yield store


@pytest.fixture
def streams(store: Redis) -> Iterator[OutputStreams]:
    streams = OutputStreams(store)
    yield streams
    streams.close()


def read(store: Redis, name: str, after: str = "0") -> list[Chunk]:
    return list(OutputReader(store, 5.0, 5.0).read(name, after))


def connections(store: Redis) -> int:
    """Return how many connections the store has taken."""
    return int(store.info("stats")["total_connections_received"])  # type: ignore[index]


def test_entries_are_bounded_expire_and_end(store: Redis, streams: OutputStreams) -> None:
    stream = streams.open("a")
    stream.write("stdout", b"x" * (ENTRY_BYTES + 1))
    stream.write("stderr", b"y")
    stream.end("succeeded")
    chunks = read(store, "a")
    assert [(chunk.stream, len(chunk.data)) for chunk in chunks] == [("stdout", ENTRY_BYTES), ("stdout", 1), ("stderr", 1)]
    assert [chunk.id for chunk in chunks] == [str(ENTRY_BYTES), str(ENTRY_BYTES + 1), str(ENTRY_BYTES + 2)]
    assert 0 < store.ttl(OUTPUT_KEY_PREFIX + "a") <= OUTPUT_TTL_S
    # A command that printed nothing has an end, too
    streams.open("b").end("succeeded")
    assert read(store, "b") == []


def test_output_that_comes_at_once_is_one_entry_and_what_comes_after_a_gap_says_how_much_is_missing(
    store: Redis, streams: OutputStreams
) -> None:
    stream = streams.open("a")
    with streams.changed:  # nothing is sent meanwhile
        for _ in range(100):
            stream.write("stdout", b"line\n")
        stream.write("stdout", b"x" * (BUFFER_BYTES + 1))
        stream.write("stdout", b"after")
    stream.end("succeeded")
    assert [(chunk.data, chunk.dropped) for chunk in read(store, "a")] == [(b"line\n" * 100, 0), (b"after", BUFFER_BYTES + 1)]


def test_the_store_keeps_the_last_of_it_and_readers_learn_what_they_missed(store: Redis, streams: OutputStreams) -> None:
    # Given a command that prints three times what is kept, at a pace at which nothing is dropped
    stream, whole = streams.open("a"), 3 * KEPT_BYTES
    for _ in range(whole // ENTRY_BYTES):
        stream.write("stdout", b"x" * ENTRY_BYTES)
        assert until(lambda: stream.waiting_bytes < BUFFER_BYTES // 2)
    stream.write("stdout", b"last")
    stream.end("succeeded")
    assert until(lambda: not stream.entries)
    chunks = read(store, "a")
    # Then it gets the last of it, and learns how much is missing
    assert 0.8 * KEPT_BYTES < sum(len(chunk.data) for chunk in chunks) <= KEPT_BYTES
    assert chunks[0].dropped + sum(len(chunk.data) for chunk in chunks) == whole + 4 and chunks[-1].data.endswith(b"last")
    assert read(store, "a", chunks[-2].id) == chunks[-1:]


def test_a_store_that_is_away_holds_nobody_up_and_gets_the_output_once(redis_urls: RedisUrls, store: Redis) -> None:
    with open_store(redis_urls.result, 0.2) as impatient:
        streams = OutputStreams(impatient)
        try:
            stream = streams.open("a")
            # Given a store that takes nothing
            store.client_pause(600_000, all=False)
            tries = connections(store)
            for number in range(100):
                stream.write("stdout", b"%d\n" % number)
            # When a command prints more than is kept for it meanwhile
            for _ in range(100):
                stream.write("stdout", b"x" * ENTRY_BYTES)
            stream.end("timed_out")
            # Then it does not wait. Once two tries to send were given up and the store takes something, it has all that was kept, once
            assert until(lambda: connections(store) > tries + 2)
            store.client_unpause()
            chunks = read(store, "a")
            text = b"".join(chunk.data for chunk in chunks)
            assert text.startswith(b"".join(b"%d\n" % number for number in range(100)) + b"xxx")
            assert 0.9 * BUFFER_BYTES < len(text) <= BUFFER_BYTES
            assert sum(chunk.dropped for chunk in chunks) + len(text) == 290 + 100 * ENTRY_BYTES
        finally:
            streams.close()


def test_what_is_no_answer_of_a_store_ends_no_thread(redis_urls: RedisUrls, tmp_path: Path) -> None:
    # Given addresses at which something answers with nonsense, of which redis-py makes no error of its own
    answered = {name: threading.Event() for name in ("written", "read")}

    class Nonsense(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(65536):
                self.request.sendall(b":none\r\n")
                answered[Path(self.server.server_address).name].set()

    stores = {name: open_store(f"redis+socket://{tmp_path / name}?virtual_host=0", 5.0) for name in answered}
    with ThreadPoolExecutor() as pool, ExitStack() as after:
        for name in answered:
            server = after.enter_context(socketserver.ThreadingUnixStreamServer(str(tmp_path / name), Nonsense))
            after.callback(server.shutdown)
            pool.submit(server.serve_forever)
        streams, reader = OutputStreams(stores["written"]), OutputReader(stores["read"], 5.0, 600.0)
        after.callback(reader.close, lambda: StackUnreachable("the test is over"))
        after.callback(streams.close)
        # When a command prints, somebody reads, another reader is closed, and the store is there later
        stream = streams.open("a")
        stream.write("stdout", b"text")
        stream.end("succeeded")
        reading = pool.submit(lambda: list(reader.read("a")))
        closed = OutputReader(stores["read"], 5.0, 600.0)
        ended = pool.submit(lambda: list(closed.read("a")))
        assert until(lambda: closed.in_use)
        closed.close(lambda: StackUnreachable("it is closed"))
        with pytest.raises(StackUnreachable, match="it is closed"):
            ended.result(60)
        for name, event in answered.items():
            assert event.wait(60)
            (tmp_path / name).unlink()
            (tmp_path / name).symlink_to(redis_urls.socket)
        # Then what was printed comes
        assert [chunk.data for chunk in reading.result(60)] == [b"text"]


def test_a_key_that_something_else_has_costs_its_own_command_alone_its_output(store: Redis) -> None:
    # Given a command whose output has no room in the store, as somebody has put something else there
    store.set(OUTPUT_KEY_PREFIX + "refused", "in the way")
    streams, reader = OutputStreams(store), OutputReader(store, 5.0, 600.0)
    refused, other = streams.open("refused"), streams.open("other")
    with ThreadPoolExecutor() as pool, ExitStack() as after:
        after.callback(reader.close, lambda: StackUnreachable("the test is over"))
        reading = {name: pool.submit(lambda name=name: list(reader.read(name))) for name in ("refused", "other")}
        refused.write("stdout", b"x")
        # When another one prints more than goes out at once, and its worker ends
        for _ in range(ENTRIES_AT_ONCE + 1):
            other.write("stdout", b"x" * ENTRY_BYTES)
        other.end("succeeded")
        streams.close()
        # Then all of that has gone out and is read, and who reads the first one is told
        assert not other.entries
        assert sum(len(chunk.data) for chunk in reading["other"].result(60)) == (ENTRIES_AT_ONCE + 1) * ENTRY_BYTES
        with pytest.raises(StackUnreachable, match="the output of refused cannot be read"):
            reading["refused"].result(60)


def test_output_goes_to_the_new_primary_after_a_failover(own_redis: RedisServer, redis_urls: RedisUrls, store: Redis) -> None:
    # Given an address at which one Redis is, to which output goes over the one connection that there is
    address = own_redis.socket.parent / "address"
    address.symlink_to(own_redis.socket)
    with own_redis.client() as first, open_store(f"redis+socket://{address}?virtual_host=0", 5.0, 1) as both, ThreadPoolExecutor() as pool:
        streams, reader = OutputStreams(both), OutputReader(store, 5.0, 600.0)
        try:
            stream = streams.open("a")
            stream.write("stdout", b"before")
            assert until(lambda: first.exists(stream.key))
            # When it becomes a replica, which ends no connection, and another one is at the address
            first.replicaof("127.0.0.1", "1")
            address.unlink()
            address.symlink_to(redis_urls.socket)
            stream.write("stdout", b"after")
            stream.end("succeeded")
            # Then output goes there
            chunks = pool.submit(lambda: list(reader.read("a"))).result(60)
            assert [(chunk.data, chunk.dropped) for chunk in chunks] == [(b"after", len(b"before"))]
        finally:
            reader.close(lambda: StackUnreachable("the test is over"))
            streams.close()


def test_many_readers_share_a_thread_that_ends_with_them(store: Redis, streams: OutputStreams) -> None:
    reader, names = OutputReader(store, 5.0, 5.0), ["a", "a", "b", "c"]
    found: list[tuple[str, bytes]] = []

    def follow(name: str) -> None:
        found.append((name, b"".join(chunk.data for chunk in reader.read(name))))

    threads = [threading.Thread(target=follow, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for name in ("a", "b", "c"):
        stream = streams.open(name)
        stream.write("stdout", name.encode() * 3)
        stream.end("succeeded")
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [("a", b"aaa"), ("a", b"aaa"), ("b", b"bbb"), ("c", b"ccc")]
    assert until(lambda: reader._thread is None)


def test_a_place_to_begin_that_is_none_is_refused(store: Redis) -> None:
    for wrong in ("$", "-1", "1-0", "x"):
        with pytest.raises(InvalidAction, match="after"):
            read(store, "a", wrong)


def test_a_command_that_is_held_back_loses_nothing_to_a_reader_that_is_slow(store: Redis, streams: OutputStreams) -> None:
    # Given a command that prints more than store and worker keep, and stops while its stream is full
    stream, whole = streams.open("a"), 6 * KEPT_BYTES

    def command() -> None:
        for number in range(whole // ENTRY_BYTES):
            assert until(lambda: not stream.is_full(), 60)
            stream.write("stdout" if number % 2 else "stderr", bytes([number % 256]) * ENTRY_BYTES)
        stream.end("succeeded")

    running = threading.Thread(target=command)
    running.start()
    # When a reader takes the first chunk, and lets the command fill what there is before it goes on
    reading = OutputReader(store, 5.0, 5.0).read("a")
    chunks = [next(reading)]
    assert until(lambda: stream.is_full())
    chunks += reading
    running.join(60)
    assert b"".join(chunk.data for chunk in chunks) == b"".join(bytes([n % 256]) * ENTRY_BYTES for n in range(whole // ENTRY_BYTES))
    assert sum(chunk.dropped for chunk in chunks) == 0


def test_a_command_waits_for_nobody_for_long(store: Redis, streams: OutputStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cpu.streams.HELD_S", 0.2)
    stream = streams.open("a")

    def fill() -> None:
        for _ in range(KEPT_BYTES // ENTRY_BYTES):
            stream.write("stdout", b"x" * ENTRY_BYTES)
            assert until(lambda: stream.waiting_bytes < BUFFER_BYTES // 2)

    # Given a command that nobody reads
    fill()
    assert stream.is_full()
    # When the time for which it is held back is over
    assert until(lambda: not stream.is_full())
    # Then it goes on without being held back again
    fill()
    assert not stream.is_full()
    # And once somebody reads, it waits for them again
    reading = OutputReader(store, 5.0, 5.0).read("a")
    next(reading)

    def is_held_back() -> bool:
        stream.write("stdout", b"y" * ENTRY_BYTES)
        return stream.is_full()

    assert until(is_held_back)
    stream.end("succeeded")
    assert sum(len(chunk.data) + chunk.dropped for chunk in reading) > KEPT_BYTES


def test_who_stops_reading_before_a_thread_has_begun_for_it_reads_no_more(store: Redis) -> None:
    begun, goes_on, reader = threading.Event(), threading.Event(), OutputReader(store, 5.0, 5.0)

    class Late(ThreadPoolExecutor):
        def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(lambda: (begun.set(), goes_on.wait(60), work(*args, **kwargs)))

    async def main() -> None:
        threads = Late(1)
        asyncio.get_running_loop().set_default_executor(threads)
        coming = asyncio.ensure_future(anext(reader.read_async("a")))  # type: ignore[arg-type]
        while not begun.is_set():
            await asyncio.sleep(0)
        coming.cancel()
        await asyncio.wait([coming])
        goes_on.set()
        threads.shutdown()

    asyncio.run(main())
    assert not reader.in_use
