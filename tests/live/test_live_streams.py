"""What a command prints while it runs, and what it is given, against a whole stack."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from tangram import ActionCancelled, AsyncClient, Chunk, Client
from tests.live.support import Live


def text_of(chunks: Iterable[Chunk], stream: str = "stdout") -> str:
    """Return what was printed on a stream."""
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream).decode()


def test_output_arrives_before_the_command_ends_in_order_and_by_stream(client: Client) -> None:
    with client.open(trajectory="t") as env:
        # Given a command that goes on only once somebody has seen what it has printed
        handle = env.submit("echo one; echo two >&2; until [ -e seen ]; do sleep 0.01; done; echo three; echo four >&2", stream=True)
        output, chunks = handle.output(), []
        while text_of(chunks) + text_of(chunks, "stderr") != "one\ntwo\n":
            chunks.append(next(output))
        assert not handle.done()
        # When it goes on
        env.write_file("seen", b"")
        chunks += output
        # Then the rest comes, then the end, and the result has the same
        done = handle.result(20)
        assert (text_of(chunks), text_of(chunks, "stderr")) == (done.stdout, done.stderr) == ("one\nthree\n", "two\nfour\n")
        assert [chunk.id for chunk in chunks] == [str(number) for number in range(1, len(chunks) + 1)]


def test_late_and_second_readers_read_from_the_beginning_or_from_an_id(client: Client, live: Live) -> None:
    with client.open(trajectory="t") as env:
        # Given a command that has ended
        handle = env.submit("for n in 1 2 3; do echo $n; sleep 0.1; done", stream=True)
        first = list(handle.output())
        handle.result(20)
        # Then a second reader, and one of another client that knows the id of the task, get the same
        assert list(handle.output()) == first and text_of(first) == "1\n2\n3\n"
        with live.client("others") as other:
            assert list(other.output(handle.id)) == first
            # And one that names an id gets what came after that
            assert list(other.output(handle.id, first[0].id)) == first[1:]


def test_a_cancelled_command_ends_its_output_with_its_error(client: Client) -> None:
    with client.open(trajectory="t") as env:
        handle = env.submit("echo begun; sleep 300", stream=True)
        chunks = []
        with pytest.raises(ActionCancelled):
            for chunk in handle.output():
                chunks.append(chunk)
                handle.cancel()
        assert text_of(chunks) == "begun\n"


def test_a_command_that_never_ran_ends_its_output_with_its_error(client: Client) -> None:
    with client.open(trajectory="t") as env:
        first = env.submit("sleep 300", stream=True)
        behind = env.submit("echo never", stream=True)
        behind.cancel()
        with pytest.raises(ActionCancelled):
            list(behind.output())
        first.cancel()


def test_two_hundred_commands_stream_at_once(live: Live) -> None:
    commands, lines = 200, 5

    async def follow(client: AsyncClient, number: int) -> tuple[int, str]:
        async with await client.open(trajectory=f"t{number}") as env:
            handle = await env.submit(f"for n in $(seq {lines}); do echo {number}.$n; sleep 0.05; done", stream=True)
            chunks = [chunk async for chunk in handle.output()]
            assert text_of(chunks) == (await handle).stdout
            return number, text_of(chunks)

    async def follow_all() -> list[tuple[int, str]]:
        async with AsyncClient("tests", live.settings) as client:
            return await asyncio.gather(*(follow(client, number) for number in range(commands)))

    for number, text in asyncio.run(follow_all()):
        assert text.split() == [f"{number}.{n}" for n in range(1, lines + 1)]
