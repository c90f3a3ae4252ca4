"""The clients that `bench.gateway` compares: each opens environments and runs empty commands in them, unchanged as its users install it.

E2B and SWE-ReX have the gateway between them and the stack, the native client has not. It runs the very shell lines that the gateway makes
of their calls. So the difference is the gateway and the foreign client.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from app.gateway.rex_scripts import run_text
from tangram import AsyncClient
from tangram.aio import AsyncEnvironment

COMMAND = "true"
E2B_LINE = shlex.join(["/bin/bash", "-l", "-c", COMMAND])
"""What E2B's client makes of a command."""

_CREATE_LIMIT_S = 60.0
_QUIET = logging.getLogger("bench.swerex")


class Way(ABC):
    """One client with as many environments as were asked for, each used by one caller at a time."""

    name: str

    def __init__(self, environments: int) -> None:
        self.environments = environments
        self.created_per_s = 0.0

    async def open(self) -> None:
        """Open all environments at once, and note how many that were per second."""
        began = time.perf_counter()
        await asyncio.gather(*(self._create(number) for number in range(self.environments)))
        self.created_per_s = self.environments / (time.perf_counter() - began)

    async def close(self) -> None:
        """Close all of them."""
        await asyncio.gather(*(self._end(number) for number in range(self.environments)))

    @abstractmethod
    def call(self, number: int) -> Awaitable[Any]:
        """Run an empty command in one of the environments."""

    @abstractmethod
    async def _create(self, number: int) -> None: ...

    @abstractmethod
    async def _end(self, number: int) -> None: ...


class Native(Way):
    """`tangram.AsyncClient`; `line` is what it runs, so that it can be the twin of any other."""

    name = "native"

    def __init__(self, environments: int, client: AsyncClient) -> None:
        super().__init__(environments)
        self.line = COMMAND
        self._client = client
        self._open: dict[int, AsyncEnvironment] = {}

    async def call(self, number: int) -> None:
        """Run the line."""
        done = await self._open[number].exec(self.line)
        assert done.exit_code == 0, done

    async def _create(self, number: int) -> None:
        self._open[number] = await self._client.open(trajectory=f"native-{number}")

    async def _end(self, number: int) -> None:
        await self._open.pop(number).close()


class E2b(Way):
    """`e2b.AsyncSandbox` and its `commands.run`."""

    name, line = "E2B", E2B_LINE

    def __init__(self, environments: int, url: str, token: str) -> None:
        super().__init__(environments)
        self._options = {"api_key": token, "api_url": url, "sandbox_url": url, "request_timeout": _CREATE_LIMIT_S}
        self._open: dict[int, Any] = {}

    async def call(self, number: int) -> None:
        """Run the command; a code other than 0 raises."""
        await self._open[number].commands.run(COMMAND)

    async def _create(self, number: int) -> None:
        import e2b

        self._open[number] = await e2b.AsyncSandbox.create(timeout=3600, **self._options)

    async def _end(self, number: int) -> None:
        await self._open.pop(number).kill()


class Rex(Way):
    """SWE-ReX's `RemoteRuntime`, which is what its `RemoteDeployment` calls, with one shell for each environment."""

    name, line = "SWE-ReX", run_text(COMMAND, "")

    def __init__(self, environments: int, address: Callable[[int], str], token: str) -> None:
        super().__init__(environments)
        self._address, self._token = address, token
        self._open: dict[int, Any] = {}

    async def call(self, number: int) -> None:
        """Run the command in its shell."""
        from swerex.runtime.abstract import BashAction

        seen = await self._open[number].run_in_session(BashAction(command=COMMAND, session=f"s{number}"))
        assert seen.exit_code == 0, seen

    async def _create(self, number: int) -> None:
        from swerex.runtime.abstract import CreateBashSessionRequest
        from swerex.runtime.remote import RemoteRuntime

        runtime = RemoteRuntime(logger=_QUIET, host=self._address(number), auth_token=self._token)
        await runtime.create_session(CreateBashSessionRequest(session=f"s{number}", startup_timeout=_CREATE_LIMIT_S))
        self._open[number] = runtime

    async def _end(self, number: int) -> None:
        await self._open.pop(number).close()


class Reference(Rex):
    """The same client with the server that SWE-ReX itself brings, which has all shells in one process."""

    name = "swerex's own server"

    async def ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the server answers."""
        from swerex.runtime.remote import RemoteRuntime

        await RemoteRuntime(logger=_QUIET, host=self._address(0), auth_token=self._token, timeout=1.0).wait_until_alive(timeout=timeout_s)

    async def _end(self, number: int) -> None:
        from swerex.runtime.abstract import CloseBashSessionRequest

        with suppress(Exception):  # the server ends anyway
            await self._open.pop(number).close_session(CloseBashSessionRequest(session=f"s{number}"))


def new_names() -> Callable[[int], str]:
    """Return names of environments that nobody has used."""
    prefix = secrets.token_hex(4)
    return lambda number: f"bench-{prefix}-{number}"
