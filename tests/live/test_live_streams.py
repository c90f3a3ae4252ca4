"""What a command prints while it runs, and what it is given, through a whole stack."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import pytest

from tangram import ActionCancelled, Chunk, Client
from tests.live.support import Live

pytestmark = pytest.mark.real


def text_of(chunks: Iterable[Chunk], stream: str = "stdout") -> str:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream).decode()


def test_output_arrives_before_the_command_ends_and_later_readers_have_all_of_it(client: Client, live: Live) -> None:
    with client.open(trajectory="t") as env:
        # Given a command that goes on only once somebody has seen what it has printed
        handle = env.submit("echo one; echo two >&2; until [ -e seen ]; do sleep 0.01; done; echo three; echo four >&2", stream=True)
        output, chunks = handle.output(), []
        while text_of(chunks) + text_of(chunks, "stderr") != "one\ntwo\n":
            chunks.append(next(output))
        assert not handle.done()
        env.write_file("seen", b"")
        chunks += output
        # Then the rest comes, then the end, and the result has the same
        done = handle.result(60)
        assert (text_of(chunks), text_of(chunks, "stderr")) == (done.stdout, done.stderr) == ("one\nthree\n", "two\nfour\n")
        assert not any(chunk.dropped for chunk in chunks) and chunks[-1].id == str(len(done.stdout + done.stderr))
        # And another client that knows the id of the task gets the same, or what came after an id
        with live.client("others") as other:
            assert list(other.output(handle.id)) == chunks
            assert list(other.output(handle.id, chunks[0].id)) == chunks[1:]


def test_a_cancelled_command_ends_its_output_with_its_error(client: Client) -> None:
    with client.open(trajectory="t") as env:
        handle, behind = env.submit("echo begun; sleep 300", stream=True), env.submit("echo never", stream=True)
        behind.cancel()
        with pytest.raises(ActionCancelled):
            list(behind.output())
        chunks = []
        with pytest.raises(ActionCancelled):
            for chunk in handle.output():
                chunks.append(chunk)
                handle.cancel()
        assert text_of(chunks) == "begun\n"


def test_input_comes_whole_in_order_and_nobody_keeps_it(client: Client, live: Live) -> None:
    with client.open(trajectory="t") as env:
        # Given a command behind another one of its session, and input that is sent before it runs
        first = env.submit("until [ -e go ]; do sleep 0.01; done")
        handle = env.submit("tr a-z A-Z", stdin=True, stream=True)
        handle.send_input(b"whisperedword\n" + b"b" * 60_000 + b"\n")
        env.write_file("go", b"")
        output = handle.output()
        assert next(output).data.startswith(b"WHISPEREDWORD\n")
        # When more comes in many messages, and then the end
        for number in range(100):
            handle.send_input(b"%d\n" % number)
        handle.close_input()
        # Then all of it is there once, in order
        expected = "WHISPEREDWORD\n" + "B" * 60_000 + "\n" + "".join(f"{number}\n" for number in range(100))
        assert (first.result(60).exit_code, handle.result(60).stdout) == (0, expected)
    # And neither the journal nor a log has what was read and printed
    live.until(lambda: live.rows(f"select 1 from actions where id = '{handle.id}' and ended_at is not null"))
    words = (b"whisperedword", b"WHISPEREDWORD", base64.b64encode(b"whisperedword")[:12])
    for path in [*live.stack.state_dir.glob("*sqlite*"), *(live.stack.state_dir / "logs").glob("*.log")]:
        if path.name != "redis.log":
            assert path.stat().st_size and not any(word in path.read_bytes() for word in words), path
