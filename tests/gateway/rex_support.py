"""Runtimes of SWE-ReX's unchanged client, for the tests of its shape."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import pytest

from tests.gateway.conftest import Served

pytest.importorskip("swerex", reason="the extra `clients` is not installed")

from swerex.deployment.remote import RemoteDeployment
from swerex.runtime.abstract import BashAction, BashInterruptAction, Command, CreateBashSessionRequest
from swerex.runtime.remote import RemoteRuntime

T = TypeVar("T")


@dataclass
class Rex:
    """A runtime of an environment of its own, and what calls it from outside an event loop."""

    served: Served
    runtime: RemoteRuntime
    name: str
    token: str

    @property
    def url(self) -> str:
        return f"{self.served.url}/envs/{self.name}"

    def post(self, method: str, key: str | None = None, **body: Any) -> httpx.Response:
        headers = {"X-API-Key": self.token} | ({"X-Request-ID": key} if key else {})
        return httpx.post(f"{self.url}/{method}", json=body, headers=headers, timeout=60)

    def run(self, command: str, **options: Any) -> str:
        return do(self.runtime.run_in_session(BashAction(command=command, **options))).output

    def interrupted(self, command: str, **options: Any) -> tuple[Any, Any]:
        """Run a command in the shell, interrupt it once it has made the file `begun`; return how the interrupt and the command ended."""

        async def both() -> tuple[Any, Any]:
            running = asyncio.create_task(self.runtime.run_in_session(BashAction(command=command, check="silent")))
            await self.runtime.execute(Command(command="until test -e begun; do sleep 0.05; done; rm begun", shell=True, timeout=60))
            return await self.runtime.run_in_session(BashInterruptAction(**options)), await running

        return asyncio.run(both())

    def execute(self, command: str | list[str], **options: Any) -> Any:
        return do(self.runtime.execute(Command(command=command, **options)))


def do(call: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    async def wait() -> T:
        return await call

    return asyncio.run(wait())


@pytest.fixture(scope="module")
def runtime_of(served: Served) -> Callable[[str, str], RemoteRuntime]:
    """Return what makes a runtime for a token and the name of an environment, the way that a user does.

    It waits for `is_alive` for longer than it does by default, since a busy machine may need longer than 150 ms.
    """

    def make(token: str, name: str) -> RemoteRuntime:
        deployment = RemoteDeployment(auth_token=token, host=f"{served.url}/envs/{name}", timeout=60)
        do(deployment.start())
        return deployment.runtime

    return make


@pytest.fixture(scope="module")
def rex(served: Served, runtime_of: Callable[[str, str], RemoteRuntime]) -> Iterator[Rex]:
    """Return a runtime with the session `default`."""
    token, name = served.token("rex"), f"rex-{secrets.token_hex(4)}"
    made = Rex(served, runtime_of(token, name), name, token)
    do(made.runtime.create_session(CreateBashSessionRequest(startup_timeout=60)))
    yield made
    do(made.runtime.close())
