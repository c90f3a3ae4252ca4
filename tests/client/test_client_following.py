"""What callbacks are told of a command's output while it runs, of a worker that prints as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tangram import AsyncClient, Client, Settings
from tangram.wire import OUTPUT_KEY_PREFIX

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
