"""Much output through E2B's client: a command is held back for a client that reads slowly, and nobody holds it back for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.gateway.conftest import Served, options_of

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real

LINE = "0123456ä€𝄞" * 10
LINES = 60_000
"""Some 10 MB, many times what waits for a reader."""

PRINT = f"yes {LINE} | head -n {LINES}"


@pytest.fixture
def sandbox(served: Served) -> Iterator[e2b.Sandbox]:
    made = e2b.Sandbox.create(**options_of(served, "output"))
    yield made
    made.kill()


def test_a_client_that_pauses_gets_all_of_it(served: Served) -> None:
    async def paused() -> tuple[str, str | None]:
        sandbox = await e2b.AsyncSandbox.create(**options_of(served, "output"))
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def take(_data: str) -> None:
            begun.set()
            await go_on.wait()

        try:
            # Given a client that does not take more than the first piece
            handle = await sandbox.commands.run(f"({PRINT}); touch ended", background=True, on_stdout=take, timeout=300)
            await begun.wait()
            # Then the command waits for it
            await sandbox.commands.run("sleep 2")
            assert not await sandbox.files.exists("ended")
            # And when it goes on, it gets everything
            go_on.set()
            done = await handle.wait()
            return done.stdout, done.error
        finally:
            await sandbox.kill()

    stdout, error = asyncio.run(paused())
    assert error in (None, "") and stdout == f"{LINE}\n" * LINES


def test_a_client_that_is_gone_does_not_hold_a_command(sandbox: e2b.Sandbox) -> None:
    # Given a command that prints much, to nobody
    handle = sandbox.commands.run(f"{PRINT}; touch ended", background=True, timeout=300)
    handle.disconnect()
    # Then it ends all the same
    assert sandbox.commands.run("until [ -e ended ]; do sleep 0.1; done; echo ended", timeout=120).stdout == "ended\n"
