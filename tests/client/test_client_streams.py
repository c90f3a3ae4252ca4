"""What a command prints and is given while it runs: callbacks, and numbered control messages. What makes no sense is refused."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tangram import Action, AsyncClient, Client, ClientClosed, InvalidAction, Settings, calls, input_messages
from tangram.wire import GIVEN_BYTES, OUTPUT_KEY_PREFIX

PLACE = calls.Place("j", "t", "env-1")
PRINTED = (("stdout", b"caf\xc3"), ("stderr", b"oh"), ("stdout", b"\xa9\n"), ("stdout", b"\xe2\x82"))


@pytest.fixture
def prints(peer: Any, redis_urls: Any) -> Iterator[Any]:
    """Have the peer's commands print `PRINTED`, the last character of which is cut off."""
    with redis_urls.client() as store:

        def behave(seen: Any) -> Any:
            if seen.kind != "cpu.exec":
                return peer.usual(seen)
            count = 0
            for stream, data in PRINTED:
                count += len(data)
                store.xadd(OUTPUT_KEY_PREFIX + seen.id, {stream: data}, id=f"{count}-0")
            store.xadd(OUTPUT_KEY_PREFIX + seen.id, {"end": "succeeded"}, id=f"{count}-1")
            return peer.printed("all of it")

        peer.behave = behave
        yield peer


def test_callbacks_get_whole_characters_of_their_stream_and_the_result_is_as_ever(prints: Any, settings: Settings) -> None:
    out: list[str] = []
    err: list[str] = []
    with Client("j", settings) as client, client.open(trajectory="t") as env:
        assert env.exec("x", on_stdout=out.append, on_stderr=err.append).stdout == "all of it"
    assert (out, err) == (["caf", "é\n", "\ufffd"], ["oh"])


def test_coroutines_are_called_back_too_and_a_stream_without_a_callback_is_left(prints: Any, settings: Settings) -> None:
    told: list[str] = []

    async def tell(text: str) -> None:
        await asyncio.sleep(0)
        told.append(text)

    async def main() -> str:
        async with AsyncClient("j", settings) as client, await client.open(trajectory="t") as env:
            return (await env.exec("x", on_stderr=tell)).stdout

    assert (asyncio.run(main()), told) == ("all of it", ["oh"])


def test_an_error_of_a_callback_is_raised_and_cancels_the_command(prints: Any, settings: Settings) -> None:
    usual = prints.behave

    def never_ends(seen: Any) -> Any:
        answer = usual(seen)
        return prints.HOLD if seen.kind == "cpu.exec" else answer

    prints.behave = never_ends
    with Client("j", settings) as client, client.open(trajectory="t") as env:
        with pytest.raises(ZeroDivisionError):
            env.exec("x", on_stdout=lambda text: 1 // 0)
        command = next(seen.id for seen in prints.seen if seen.kind == "cpu.exec")
        prints.until(lambda: any(command in control.get("cancel", {}).get("ids", ()) for control in prints.controls))


def given(controls: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return id, number and content of what was sent."""
    return [(each["give"]["id"], each["give"]["number"], each["give"]["what"]) for each in controls]


def test_messages_are_numbered_for_each_command_and_name_their_sender(peer: Any, settings: Any) -> None:
    peer.behave = lambda seen: peer.HOLD
    with Client("j", settings) as client:
        first, second = (client.submit(calls.execute(PLACE, "cat", pty=(9, 9), session=name)) for name in "ab")
        first.send_input(b"a")
        second.send_input(b"b")
        first.resize_pty(24, 80)
        first.signal(signal.SIGINT)
        first.close_input()
        peer.until(lambda: len(peer.controls) == 5)
        assert given(peer.controls) == [
            (first.id, 1, ["data", "YQ=="]),
            (second.id, 1, ["data", "Yg=="]),
            (first.id, 2, ["size", 24, 80]),
            (first.id, 3, ["signal", 2]),
            (first.id, 4, ["end"]),
        ]
        assert {each["give"]["job"] for each in peer.controls} == {"j"}
        assert all(first.id.startswith(each["give"]["client"] + "-") for each in peer.controls)
        senders = {(each["give"]["id"], each["give"]["sender"]) for each in peer.controls}
        assert len(senders) == 2


async def test_coroutines_give_alike(peer: Any, settings: Any) -> None:
    peer.behave = lambda seen: peer.HOLD
    async with AsyncClient("j", settings) as client:
        handle = await client.submit(calls.execute(PLACE, "cat", pty=(24, 80)))
        await handle.send_input(b"a")
        await handle.close_input()
        peer.until(lambda: len(peer.controls) == 2)
    assert given(peer.controls) == [(handle.id, 1, ["data", "YQ=="]), (handle.id, 2, ["end"])]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        *(
            (lambda pty=pty: calls.execute(PLACE, "cat", pty=pty), "pty|rows|columns")
            for pty in ((24,), (24, 80, 1), "ab", (0, 80), (24, 70_000), (24.0, 80), 7)
        ),
        *(
            (lambda data=data: input_messages.data(data), f"data: must be .*bytes.*, not {said}")
            for data, said in ((b"", 0), (b"x" * (GIVEN_BYTES + 1), GIVEN_BYTES + 1), ("text", "str"))
        ),
        *((lambda number=number: input_messages.signal_of(number), "number") for number in (0, 99, True, "INT")),
    ],
)
def test_terminals_input_and_signals_that_make_no_sense_are_refused(make: Any, field: str) -> None:
    with pytest.raises(InvalidAction, match=field):
        make()


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"stdin": True}])
async def test_what_a_command_was_not_submitted_with_is_refused_when_it_is_asked_for(
    peer: Any, settings: Any, options: calls.ExecOptions
) -> None:
    peer.behave = lambda seen: peer.HOLD
    async with AsyncClient("j", settings) as client:
        handle = await client.submit(calls.execute(PLACE, "cat", **options))
        of_thread = handle._handle
        for call in (
            *(() if "stream" in options else (handle.output, of_thread.output)),
            *(() if "stdin" in options else (of_thread.close_input, lambda: of_thread.send_input(b"a"))),
            lambda: of_thread.resize_pty(24, 80),
        ):
            with pytest.raises(InvalidAction, match="^(stream|stdin|pty): action .* has none: submit a command with "):
                call()
        for given in (*(() if "stdin" in options else (handle.close_input(), handle.send_input(b"a"))), handle.resize_pty(24, 80)):
            with pytest.raises(InvalidAction, match="^(stream|stdin|pty): action .* has none: submit a command with "):
                await given
        with pytest.raises(InvalidAction, match="^command: action .* has none: submit a command$"):
            await (await client.submit(calls.read_file(PLACE, "f"))).signal(signal.SIGINT)
    assert not [each for each in peer.controls if "give" in each]


def test_the_output_of_what_could_not_be_sent_ends_with_that(peer: Any, settings: Any) -> None:
    with Client("j", settings) as client:
        action = Action(kind="my.task", arguments={"stream": True, "never": object()})
        with pytest.raises(InvalidAction, match="cannot be sent as JSON"):
            list(client.submit(action).output())


def test_readers_end_with_their_client(peer: Any, settings: Any) -> None:
    peer.behave = lambda seen: peer.HOLD
    client = Client("j", settings)
    output = client.submit(calls.execute(PLACE, "cat", stream=True)).output()
    threading.Timer(0.2, client.close).start()
    with pytest.raises(ClientClosed):
        next(output)
