"""The async client: hundreds of coroutines on one client."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tangram import Action, AsyncClient, Client, ClientClosed, EnvironmentLost, ResultNotReady, Settings

MANY = 100
"""More commands than any pool of connections or threads would have."""


async def arrived(condition: Any, timeout_s: float = 60.0) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_hundred_commands_at_once_need_four_connections(peer: Any, settings: Settings, redis_urls: Any) -> None:
    held: list[Any] = []

    def hold_all(seen: Any) -> Any:
        if seen.kind == "cpu.exec":
            held.append(seen)
            return peer.HOLD
        if seen.kind == "release":
            for waiting in held:
                peer.store(waiting.id, peer.printed(waiting.arguments["command"]))
        return peer.payload()

    def connections() -> set[str]:
        with redis_urls.client() as redis:
            return {connection["id"] for connection in redis.client_list()}

    # Given a peer that has made all its connections, and gives no results before all commands have arrived
    async with AsyncClient(settings=settings) as warm:
        await (await warm.submit(Action(kind="warm")))
    before, peer.behave = connections(), hold_all
    async with AsyncClient(settings=settings) as client:
        env = await client.open(trajectory="t")
        waiting = [asyncio.ensure_future(env.exec(f"echo {n}")) for n in range(MANY)]
        await arrived(lambda: len(held) == MANY)
        await (await client.submit(Action(kind="release")))
        assert [(await done).stdout for done in waiting] == [f"echo {n}" for n in range(MANY)]
        assert len(connections() - before) <= 5


async def test_leaving_the_block_of_an_environment_that_cannot_be_closed_keeps_what_was_earned(
    peer: Any, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    peer.behave = lambda seen: EnvironmentLost("it burned", "n1") if seen.kind == "cpu.close" else peer.usual(seen)
    async with AsyncClient(settings=settings) as client:
        async with await client.open(trajectory="a") as env:
            reward = (await env.exec("1.0")).stdout
        assert reward == "1.0" and caplog.messages == [f"environment {env.id}, as its block was left: it burned"]
        with pytest.raises(EnvironmentLost):
            await (await client.open(trajectory="b")).close()


async def test_the_same_words_awaited_and_leaving_by_an_exception_closes_what_was_opened(peer: Any, settings: Settings) -> None:
    lost = EnvironmentLost("environment e is lost: it burned", "n1")
    with pytest.raises(EnvironmentLost, match="it burned") as caught:
        async with AsyncClient(job="j", settings=settings) as client:
            async with await client.open(trajectory="t", memory_mb=64) as env:
                await env.write_file("a", b"1")
                assert (await env.exec("ls")).stdout == "ls"
                handle = await env.submit("pwd")
                assert (await handle.result(timeout_s=30)).stdout == (await handle).stdout == "pwd"
                assert handle.done()
            await client.cancel(trajectory="t")
            other = await client.open(trajectory="u", detached=True)
            await client.open(trajectory="v")
            peer.behave = lambda seen: lost if seen.kind in ("cpu.exec", "cpu.close") else peer.usual(seen)
            await other.exec("echo")
    assert caught.value.node == "n1"
    peer.until(lambda: peer.controls)
    assert peer.kinds() == [f"cpu.{kind}" for kind in ("open", "write_file", "exec", "exec", "close", "open", "open", "exec", "close")]
    assert peer.seen[5].header["detached"] is True


async def test_without_entering_the_context_the_first_call_connects(peer: Any, settings: Settings) -> None:
    client = AsyncClient(settings=settings)
    await asyncio.gather(*await asyncio.gather(*(client.submit(Action(kind="my.task")) for _ in range(5))))
    await client.close()
    await client.close()
    with pytest.raises(ClientClosed):
        await client.submit(Action(kind="my.task"))
    assert len({seen.id.partition("-")[0] for seen in peer.seen}) == 1


async def test_cancelling_a_coroutine_cancels_its_action(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: peer.HOLD if seen.kind == "cpu.exec" else peer.payload()
    async with AsyncClient(settings=settings) as client:
        env = await client.open(trajectory="t")
        waiting = asyncio.ensure_future(env.exec("sleep 100"))
        await arrived(lambda: "cpu.exec" in peer.kinds())
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await arrived(lambda: peer.controls)
        # Then a result that comes all the same disturbs nobody
        task_id = next(seen.id for seen in peer.seen if seen.kind == "cpu.exec")
        peer.store(task_id, peer.printed("late"))
        await env.write_file("after", b"")
    assert peer.controls == [{"cancel": {"ids": [task_id]}}]


async def test_a_waiter_that_is_cancelled_or_out_of_patience_takes_nothing_from_another(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: peer.HOLD
    async with AsyncClient(settings=settings) as client:
        handle = await client.submit(Action(kind="my.task"))
        first, second = (asyncio.ensure_future(handle.result()) for _ in range(2))
        await arrived(lambda: peer.seen)
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(ResultNotReady):
            await handle.result(timeout_s=0.02)
        peer.store(handle.id, "late but there")
        assert await second == "late but there"
        # Only the one that was cancelled has asked for a cancel
        await arrived(lambda: peer.controls)
    assert peer.controls == [{"cancel": {"ids": [handle.id]}}]


async def test_a_handle_of_the_sync_client_can_be_awaited(peer: Any, settings: Settings) -> None:
    with Client(settings=settings) as client:
        assert (await client.open(trajectory="t").submit("hostname")).stdout == "hostname"


async def test_what_is_submitted_is_packed_and_sent_beside_the_event_loop(peer: Any, settings: Settings) -> None:
    # Given arguments that note which thread packs them
    packing: set[int] = set()

    class Noted(dict[str, str]):
        def items(self) -> Any:
            packing.add(threading.get_ident())
            return super().items()

    peer.behave = lambda seen: seen.arguments["data"]["text"]
    # When they are submitted; then their results come, and it was not the loop's thread
    async with AsyncClient(settings=settings) as client:
        handles = [await client.submit(Action(kind="my.task", arguments={"data": Noted(text="sent")})) for _ in range(5)]
        assert [await handle.result() for handle in handles] == ["sent"] * 5
    assert packing and threading.get_ident() not in packing
