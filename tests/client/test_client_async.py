"""The async client: hundreds of coroutines on one client."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tangram import Action, ActionLost, AsyncClient, Client, ClientClosed, EnvironmentLost, ResultNotReady, Settings

MANY = 300
"""More commands than any pool of connections or threads would have."""


async def arrived(condition: Any, timeout_s: float = 60.0) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def test_hundreds_of_commands_at_once_need_four_connections(peer: Any, settings: Settings, redis_urls: Any) -> None:
    redis = redis_urls.client()
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
        return {connection["id"] for connection in redis.client_list()}

    async def scenario() -> tuple[list[str], int]:
        # Given a peer that has made all its connections, and gives no results before all commands have arrived
        async with AsyncClient(settings=settings) as warm:
            await (await warm.submit(Action(kind="warm")))
        before, peer.behave = connections(), hold_all
        async with AsyncClient(settings=settings) as client:
            env = await client.open(trajectory="t")
            # When
            waiting = [asyncio.ensure_future(env.exec(f"echo {n}")) for n in range(MANY)]
            await arrived(lambda: len(held) == MANY)
            await (await client.submit(Action(kind="release")))
            return [(await done).stdout for done in waiting], len(connections() - before)

    outputs, used = asyncio.run(scenario())
    redis.close()
    # Then everybody got the own result
    assert outputs == [f"echo {n}" for n in range(MANY)]
    assert used <= 4


def test_the_same_words_awaited(peer: Any, settings: Settings) -> None:
    async def scenario() -> None:
        async with AsyncClient(job="j", settings=settings) as client:
            async with await client.open(trajectory="t", memory_mb=64) as env:
                await env.write_file("a", b"1")
                assert (await env.exec("ls")).stdout == "ls"
                handle = await env.submit("pwd")
                assert (await handle.result(timeout_s=30)).stdout == (await handle).stdout == "pwd"
                assert handle.done()
            await client.cancel(trajectory="t")

    asyncio.run(scenario())
    peer.until(lambda: peer.controls)
    assert peer.kinds() == ["cpu.open", "cpu.write_file", "cpu.exec", "cpu.exec", "cpu.close"]


def test_without_entering_the_context_the_first_call_connects(peer: Any, settings: Settings) -> None:
    async def scenario() -> None:
        client = AsyncClient(settings=settings)
        handles = await asyncio.gather(*(client.submit(Action(kind="my.task")) for _ in range(5)))
        await asyncio.gather(*handles)
        await client.close()
        await client.close()
        with pytest.raises(ClientClosed):
            await client.submit(Action(kind="my.task"))

    asyncio.run(scenario())
    assert len({seen.id.partition("-")[0] for seen in peer.seen}) == 1


def test_cancelling_a_coroutine_cancels_its_action(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: peer.HOLD if seen.kind == "cpu.exec" else peer.payload()

    async def scenario() -> str:
        async with AsyncClient(settings=settings) as client:
            env = await client.open(trajectory="t")
            waiting = asyncio.ensure_future(env.exec("sleep 100"))
            await arrived(lambda: "cpu.exec" in peer.kinds())
            # When
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await arrived(lambda: peer.controls)
            # Then a result that comes all the same disturbs nobody
            task_id = next(seen.id for seen in peer.seen if seen.kind == "cpu.exec")
            peer.store(task_id, peer.printed("late"))
            await env.write_file("after", b"")
            return str(task_id)

    task_id = asyncio.run(scenario())
    assert peer.controls == [{"cancel": {"ids": [task_id]}}]


def test_one_of_two_waiters_may_be_cancelled(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: peer.HOLD

    async def scenario() -> Any:
        async with AsyncClient(settings=settings) as client:
            handle = await client.submit(Action(kind="my.task"))
            first, second = (asyncio.ensure_future(handle.result()) for _ in range(2))
            await arrived(lambda: peer.seen)
            first.cancel()
            await asyncio.wait([first])
            peer.store(handle.id, "late but there")
            return await second

    assert asyncio.run(scenario()) == "late but there"


def test_running_out_of_patience_cancels_nothing(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: peer.HOLD

    async def scenario() -> Any:
        async with AsyncClient(settings=settings) as client:
            handle = await client.submit(Action(kind="my.task"))
            with pytest.raises(ResultNotReady):
                await handle.result(timeout_s=0.02)
            await arrived(lambda: peer.seen)
            peer.store(handle.id, 7)
            return await handle

    assert asyncio.run(scenario()) == 7
    assert peer.controls == []


def test_the_loss_of_an_environment_is_an_error_of_its_own(peer: Any, settings: Settings) -> None:
    lost = EnvironmentLost("environment e is lost: it burned", "n1")
    peer.behave = lambda seen: lost if seen.kind == "cpu.exec" else peer.usual(seen)

    async def scenario() -> None:
        async with AsyncClient(settings=settings) as client:
            env = await client.open(trajectory="t", detached=True)
            with pytest.raises(EnvironmentLost, match="it burned") as caught:
                await env.exec("echo")
            assert caught.value.node == "n1"

    asyncio.run(scenario())
    assert peer.seen[0].header["detached"] is True


def test_leaving_by_an_exception_closes_what_was_opened(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: ActionLost("node n1 is lost") if seen.kind == "cpu.close" else peer.usual(seen)

    async def scenario() -> None:
        async with AsyncClient(settings=settings) as client:
            await client.open(trajectory="a")
            await client.open(trajectory="b")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())
    assert peer.kinds() == ["cpu.open", "cpu.open", "cpu.close", "cpu.close"]


def test_a_handle_of_the_sync_client_can_be_awaited(peer: Any, settings: Settings) -> None:
    with Client(settings=settings) as client, client.open(trajectory="t") as env:

        async def scenario() -> str:
            return (await env.submit("hostname")).stdout

        assert asyncio.run(scenario()) == "hostname"


def test_what_is_submitted_is_packed_and_sent_beside_the_event_loop(peer: Any, settings: Settings) -> None:
    # Given arguments that note which thread packs them
    packing: set[int] = set()

    class Noted(dict[str, str]):
        def items(self) -> Any:
            packing.add(threading.get_ident())
            return super().items()

    peer.behave = lambda seen: seen.arguments["data"]["text"]

    async def scenario() -> list[Any]:
        packing.clear()
        async with AsyncClient(settings=settings) as client:
            handles = [await client.submit(Action(kind="my.task", arguments={"data": Noted(text="sent")})) for _ in range(5)]
            return [await handle.result() for handle in handles]

    # When they are submitted; then their results come, and it was not the loop's thread
    assert asyncio.run(scenario()) == ["sent"] * 5
    assert packing and threading.get_ident() not in packing
