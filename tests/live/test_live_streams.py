"""What a command prints while it runs, and what it is given, against a whole stack."""

from __future__ import annotations

import asyncio
import base64
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from app.local.stack import StackPlan
from tangram import ActionCancelled, AsyncClient, AsyncEnvironment, Chunk, Client, EnvironmentLost, Handle, giving
from tangram.connection import redis_url
from tangram.publisher import ControlRequest
from tests.live.support import Live, running
from workers.cpu.streams import HELD_S


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
        done = handle.result(60)
        assert (text_of(chunks), text_of(chunks, "stderr")) == (done.stdout, done.stderr) == ("one\nthree\n", "two\nfour\n")
        assert not any(chunk.dropped for chunk in chunks) and chunks[-1].id == str(len(done.stdout + done.stderr))


def test_late_and_second_readers_read_from_the_beginning_or_from_an_id(client: Client, live: Live) -> None:
    with client.open(trajectory="t") as env:
        # Given a command that has ended
        handle = env.submit("for n in 1 2 3; do echo $n; sleep 0.1; done", stream=True)
        first = list(handle.output())
        handle.result(60)
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


def test_input_is_echoed_in_order_and_its_end_ends_the_command(client: Client) -> None:
    with client.open(trajectory="t") as env:
        # Given a command that copies its input, and input that is sent before it runs
        handle = env.submit("cat", stream=True, stdin=True)
        handle.send_input(b"0\n")
        output = handle.output()
        assert next(output).data == b"0\n"
        # When more comes in many messages, and then the end
        for number in range(1, 300):
            handle.send_input(b"%d\n" % number)
        handle.close_input()
        # Then all of it is there once, in order
        assert text_of(output) == "".join(f"{number}\n" for number in range(1, 300))
        done = handle.result(60)
        assert (done.exit_code, done.stdout) == (0, "".join(f"{number}\n" for number in range(300)))
        # And what comes later is dropped
        handle.send_input(b"late\n")


def test_input_for_a_command_that_waits_is_kept(client: Client) -> None:
    with client.open(trajectory="t") as env:
        # Given a command behind another one of its session
        first = env.submit("until [ -e go ]; do sleep 0.01; done")
        behind = env.submit("cat", stdin=True)
        for part in (b"a", b"b" * 65_536, b"c"):
            behind.send_input(part)
        behind.close_input()
        # When that one ends
        env.write_file("go", b"")
        # Then the other gets its input
        assert first.result(60).exit_code == 0
        assert behind.result(60).stdout == "a" + "b" * 65_536 + "c"


def test_messages_that_come_twice_or_out_of_order_give_input_once_and_in_order(client: Client) -> None:
    with client.open(trajectory="t") as env:
        handle = env.submit("cat", stdin=True)
        session = client._session
        messages = [session._giving.message(handle.id, giving.data(b"%d\n" % number)) for number in range(5)]
        for number in (1, 0, 0, 3, 2, 1, 4, 4):
            session._publisher.send(ControlRequest(messages[number]))
        handle.close_input()
        assert handle.result(60).stdout == "0\n1\n2\n3\n4\n"


def test_a_command_takes_nothing_from_other_jobs(client: Client, live: Live) -> None:
    with client.open(trajectory="t") as env, live.client("strangers") as stranger, live.client("tests") as colleague:
        handle = env.submit("cat", stdin=True)
        # What others give to a command that the scheduler does not know yet is dropped.
        live.until(lambda: live.rows(f"select 1 from actions where id = '{handle.id}'"))
        for other, words in ((stranger, b"strange\n"), (colleague, b"known\n")):
            Handle(handle.id, handle.future, other._session).send_input(words)
        Handle(handle.id, handle.future, colleague._session).close_input()
        assert handle.result(60).stdout == "known\n"


def test_a_signal_reaches_the_program(client: Client) -> None:
    with client.open(trajectory="t") as env:
        program = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(60)"
        handle = env.submit(f'python3 -c "{program}"', stream=True)
        for chunk in handle.output():
            assert chunk.data == b"ready\n"
            handle.signal(signal.SIGTERM)
        assert handle.result(60).exit_code == 7


def test_a_terminal_takes_input_control_c_and_another_size(live: Live) -> None:
    async def use() -> str:
        async with AsyncClient("tests", live.settings) as client, await client.open(trajectory="t") as env:
            handle = await env.submit("bash --norc -i", stream=True, pty=(24, 80))
            await handle.send_input(b"PS1=; stty size; sh -c \"echo wai''ting; exec sleep 300\"\n")
            seen = ""
            async for chunk in handle.output():
                before, seen = seen, seen + chunk.data.decode()
                if "waiting" in seen and "waiting" not in before:
                    await handle.resize_pty(30, 90)
                    await handle.signal(signal.SIGINT)
                    await handle.send_input(b"stty size; exit 4\n")
            assert (await handle).exit_code == 4
            return seen

    seen = asyncio.run(use())
    assert "24 80\r\n" in seen and "30 90\r\n" in seen.partition("waiting")[2]


@pytest.fixture(scope="module")
def calm(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run a stack that writes an event log, whose worker may be slow to answer; the last test of this file kills and replaces it."""
    folder = tmp_path_factory.mktemp("calm")
    variables = {"TANGRAM_EVENT_LOG": str(folder / "events"), "TANGRAM_ISOLATION": "none"}
    with running(folder, StackPlan(nodes=1, cores=2, memory_mb=4096, cells=0, api_nodes=0, variables=variables)) as started:
        yield started


def test_a_hundred_commands_stream_at_once(calm: Live) -> None:
    environments, sessions, lines = 5, 20, 3

    async def follow(env: AsyncEnvironment, name: str) -> None:
        command = f"for n in 1 2 {lines}; do echo {name}.$n; sleep 0.02; done"
        handle = await env.submit(command, session=name, stream=True)
        printed = text_of([chunk async for chunk in handle.output()])
        assert printed == (await handle).stdout == "".join(f"{name}.{n}\n" for n in range(1, lines + 1))

    async def follow_all() -> None:
        async with AsyncClient("tests", calm.settings) as client:
            opened = await asyncio.gather(*(client.open(trajectory=f"t{n}") for n in range(environments)))
            await asyncio.gather(*(follow(env, f"s{n}") for env in opened for n in range(sessions)))

    asyncio.run(follow_all())


def test_a_slow_store_and_a_killed_worker(calm: Live) -> None:
    live, event_log = calm, Path(calm.environment["TANGRAM_EVENT_LOG"])
    with live.client("tests") as client, Redis.from_url(redis_url(live.stack.result_url)) as store:
        env = client.open(trajectory="t")
        command = "tr a-z A-Z; until [ -e go ]; do sleep 0.01; done; head -c 6000000 /dev/zero; touch printed"
        handle = env.submit(command, stream=True, stdin=True)
        handle.send_input(b"whisperedword\n")
        handle.close_input()
        output = handle.output()
        assert next(output).data == b"WHISPEREDWORD\n"
        folder = next(live.stack.state_dir.glob("environments/*/environments/*/work"))
        # Given a store that takes nothing for two seconds
        store.client_pause(2000, all=False)
        paused_at = time.monotonic()
        # When a command prints far more than is kept for it meanwhile, and nobody reads
        (folder / "go").touch()
        live.until(lambda: (folder / "printed").exists())
        # Then it has waited for its reader, and not for ever
        assert time.monotonic() - paused_at >= HELD_S
        # And the reader learns how much is missing, of output that is otherwise whole, and how the command has ended
        rest = list(output)
        lost = sum(chunk.dropped for chunk in rest)
        assert lost > 0 and lost + sum(len(chunk.data) for chunk in rest) == 6_000_000
        assert handle.result(60).exit_code == 0
        # Neither journal nor event log know what was read and printed
        live.until(lambda: live.rows(f"select 1 from actions where id = '{handle.id}' and ended_at is not null"))
        words = (b"whisperedword", b"WHISPEREDWORD", base64.b64encode(b"whisperedword\n"))
        held = [event_log, *live.stack.state_dir.glob("*sqlite*"), *(live.stack.state_dir / "logs").glob("*.log")]
        for path in held:
            assert path.stat().st_size and not any(word in path.read_bytes() for word in words), path
        # When the worker is killed under a command
        lost_handle = env.submit("echo begun; sleep 300", stream=True)
        chunks = []
        with pytest.raises(EnvironmentLost):
            for chunk in lost_handle.output():
                chunks.append(chunk)
                live.end("cpu-0")
                live.stack.restart("cpu-0")
        # Then its output ends with the error of the action
        assert text_of(chunks) == "begun\n"
