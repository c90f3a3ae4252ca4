"""uni-agent, verl's agentic layer: the sandbox `tangram`. Import this module before a sandbox is built; that registers it.

A failure of the stack is raised to the agent. uni-agent makes an exit code of an error while the sandbox is alive. So from a failure on,
this one does not count as alive until a command has run again.
"""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import Any, ClassVar

from uni_agent.sandbox.base import ExecResult, SandboxConfig
from uni_agent.sandbox.base import Sandbox as BaseSandbox
from uni_agent.sandbox.registry import register_sandbox

from tangram.aio import AsyncClient
from tangram.errors import TangramError
from tangram.integrations.sandbox import Sandbox, borrow_client, return_client
from tangram.results import ExecResult as Done

TIMED_OUT = -1


@register_sandbox("tangram")
class TangramSandbox(BaseSandbox):  # type: ignore[misc]  # uni-agent is not there for the type checker
    """An environment of a stack.

    `sandbox_kwargs` may hold `job`, `trajectory`, `memory_mb`, `units` (acceptable numbers of cores of a command) and `image_needed`.
    """

    supports_shell: ClassVar[bool] = True

    def __init__(
        self,
        *,
        image: str | None = None,
        runtime_timeout: float | None = None,
        job: str = "uni-agent",
        trajectory: str = "",
        memory_mb: int | None = None,
        units: tuple[int, ...] = (1,),
        image_needed: bool = False,
    ) -> None:
        """Prepare; `start` opens it, and it is closed `runtime_timeout` seconds later at the latest."""
        self._options: dict[str, Any] = {"image": image, "memory_mb": memory_mb, "image_needed": image_needed}
        self._job, self._trajectory, self._units, self._runtime_s = job, trajectory, tuple(units), runtime_timeout
        self._client: AsyncClient | None = None
        self._sandbox: Sandbox | None = None
        self._failed = False
        self._shells = 0

    @classmethod
    def from_config(cls, config: SandboxConfig) -> TangramSandbox:
        """Make one from a configuration of uni-agent."""
        return cls(image=config.image, runtime_timeout=config.runtime_timeout, **config.sandbox_kwargs)

    async def start(self) -> None:
        """Open the environment."""
        if self._sandbox is None:
            self._client = borrow_client(self._job)
            trajectory = self._trajectory or f"uni-{secrets.token_hex(8)}"
            self._sandbox = await Sandbox.open(self._client, trajectory=trajectory, **self._options)
            if self._runtime_s:
                self._sandbox.end_after(self._runtime_s)

    async def stop(self) -> None:
        """Close the environment. Idempotent."""
        (client, self._client), (sandbox, self._sandbox) = (self._client, None), (self._sandbox, None)
        try:
            if sandbox is not None:
                await sandbox.close()
        finally:
            if client is not None:
                await return_client(client)

    async def is_alive(self) -> bool:
        """Return whether commands can run: not after a failure of the stack."""
        return not self._failed and self._sandbox is not None and await self._sandbox.state() == "running"

    async def open_shell(self, *, cwd: str | None = None, env: dict[str, str] | None = None) -> TangramShell:
        """Open a shell: a session of the environment, whose folder and variables stay between commands."""
        self._shells += 1
        shell = TangramShell(self, f"uni-{self._shells}")
        steps = [f"export {name}={shlex.quote(text)}" for name, text in (env or {}).items()]
        if cwd:
            steps.append(f"cd {shlex.quote(cwd if cwd.startswith('/') else './' + cwd)}")
        if steps:
            done = await shell.run(" && ".join(steps))
            if done.exit_code != 0:
                raise RuntimeError(f"the shell cannot be opened: {done.stderr.strip()}")
        return shell

    async def read_file(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return await self._opened.read_file(path)

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Write a file, its parent folders too."""
        await self._opened.write_file(path, content)

    async def upload(self, local_path: Path | str, remote_path: str) -> None:
        """Bring a file, or the contents of a folder, into the environment."""
        await self._opened.upload(local_path, remote_path)

    async def download(self, remote_path: str, local_path: Path | str) -> None:
        """Fetch a file, or the contents of a folder."""
        await self._opened.download(remote_path, local_path)

    async def upload_file(self, local_file: Path | str, remote_file: str) -> None:
        """Bring a file into the environment."""
        await self._opened.upload(local_file, remote_file)

    async def download_file(self, remote_file: str, local_file: Path | str) -> None:
        """Fetch a file."""
        await self._opened.download(remote_file, local_file)

    async def _exec(
        self, argv: list[str], *, timeout: float | None = None, workdir: str | None = None, env: dict[str, str] | None = None
    ) -> ExecResult:
        *words, last = argv
        try:
            done = await self._opened.exec(
                last, interpreter=words, cwd=workdir or "", variables=env, timeout_s=timeout, units=self._units, whole=True
            )
        except TangramError:
            self._failed = True
            raise
        self._failed = False
        return _result(done)

    @property
    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("the sandbox was not started, or was stopped")
        return self._sandbox


class TangramShell:
    """A session of an environment; `TangramSandbox.open_shell` makes these."""

    def __init__(self, sandbox: TangramSandbox, session: str) -> None:
        self._sandbox, self._session = sandbox, session

    async def run(self, command: str, *, timeout: float | None = None) -> ExecResult:
        """Run a command. One that runs out of time is ended, and the shell goes on."""
        done = await self._sandbox._opened.exec_in_session(
            command, session=self._session, timeout_s=timeout, units=self._sandbox._units, whole=True
        )
        return _result(done)

    async def close(self) -> None:
        """End the shell."""
        await self._sandbox._opened.exec_in_session("exit 0", session=self._session)


def _result(done: Done) -> ExecResult:
    """Return a result in uni-agent's words; the end of its standard error says where output is truncated."""
    return ExecResult(exit_code=TIMED_OUT if done.exit_code is None else done.exit_code, stdout=done.stdout, stderr=done.stderr_and_remark)
