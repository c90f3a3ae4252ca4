"""NeMo Gym: a sandbox provider, found as `tangram` by the entry point `nemo_gym.sandbox_providers` once this package is installed.

    sandbox:
      tangram: {job: nemo-gym}

A failure of the stack is raised, from `create` as `SandboxCreateError`. It is not made an exit code with an `error_type`, which agents such
as mini_swe_agent_2 do not look at: they would take it for the program's own.
"""

from __future__ import annotations

import asyncio
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from nemo_gym.sandbox.providers.base import (
    SandboxCreateError,
    SandboxExecResult,
    SandboxHandle,
    SandboxSpec,
    SandboxStatus,
)

from tangram.aio import AsyncClient
from tangram.errors import TangramError
from tangram.integrations.sandbox import Sandbox, State, borrow_client, keep, return_client

TIMED_OUT = 125

_STATUS: dict[State, str] = {"running": "running", "closed": "stopped", "lost": "error", "unknown": "unknown"}


@dataclass(frozen=True)
class _Opened:
    """What a handle holds: the sandbox, and what its specification says of commands."""

    sandbox: Sandbox
    units: tuple[int, ...]
    variables: dict[str, str] = field(default_factory=dict)


class TangramProvider:
    """Environments of a stack as sandboxes of NeMo Gym."""

    name = "tangram"

    def __init__(self, job: str = "nemo-gym", image_needed: bool = False) -> None:
        """Prepare; `create` connects.

        With `image_needed` a sandbox with an image is refused where no node has containers, else the image is a label there.
        """
        self._job, self._image_needed = job, image_needed
        self._client: AsyncClient | None = None

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        """Open an environment, which is closed `ttl_s` seconds later at the latest.

        Of `resources`, `cpu` is the most cores that a command gets, and `memory_mib` is reserved. Disk is limited by the workers' settings.
        `provider_options` may hold `trajectory`, and `requires`, labels that the node must have.
        """
        options, resources = spec.provider_options, spec.resources
        if resources.gpu or spec.entrypoint:
            raise SandboxCreateError("environments of a stack have no GPU and no entrypoint")
        if self._client is None:
            self._client = borrow_client(self._job)
        try:
            sandbox = await Sandbox.open(
                self._client,
                trajectory=options.get("trajectory") or spec.metadata.get("instance_id") or "nemo-gym",
                image=spec.image,
                image_needed=self._image_needed,
                memory_mb=resources.memory_mib,
                requires=options.get("requires", ()),
                timeout_s=spec.ready_timeout_s,
            )
            if spec.workdir:
                await _make_folder(sandbox, spec.workdir)
        except TangramError as error:
            raise SandboxCreateError(f"the environment cannot be opened: {error}") from error
        if spec.ttl_s:
            sandbox.end_after(float(spec.ttl_s))
        units = tuple(range(1, max(1, int(resources.cpu or 1)) + 1))
        return SandboxHandle(sandbox.id, self.name, _Opened(sandbox, units, dict(spec.env)))

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        """Run a command as the user of the environment, which `root` stands for here. Raises `ValueError` for other users.

        Its output is whole, or the call raises `SubmissionCut`. Output of a command that a limit has ended may be truncated. The end of
        standard error says so.
        """
        if user not in (None, "root", 0):
            raise ValueError(f"commands run as the user of the environment: none can run as {user!r}")
        opened: _Opened = handle.raw
        variables = opened.variables | (env or {})
        done = await opened.sandbox.exec(command, cwd=cwd or "", variables=variables, timeout_s=timeout_s, units=opened.units, whole=True)
        stdout, stderr = done.stdout, done.stderr_and_remark
        if done.exit_code is None:
            return SandboxExecResult(stdout, stderr, TIMED_OUT, "timeout")
        return SandboxExecResult(stdout, stderr, done.exit_code)

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        """Bring a file into the environment."""
        await handle.raw.sandbox.upload(source_path, target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        """Fetch a file. Raises `FileNotFoundError`."""
        await handle.raw.sandbox.download(source_path, target_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        """Return how the environment is, by a command that does nothing."""
        return SandboxStatus(_STATUS[await handle.raw.sandbox.state()])

    async def close(self, handle: SandboxHandle) -> None:
        """Close the environment."""
        await handle.raw.sandbox.close()

    async def aclose(self) -> None:
        """Give the client back; the last provider of a job to do so closes it."""
        client, self._client = self._client, None
        if client is not None:
            await return_client(client)


async def _make_folder(sandbox: Sandbox, folder: str) -> None:
    """Make the work folder; where that fails, or is cancelled, the environment is closed."""
    try:
        made = await sandbox.exec(f"mkdir -p {shlex.quote(folder)}")
        if made.exit_code != 0:
            raise SandboxCreateError(f"the work folder cannot be made: {made.stderr.strip() or made.reason}")
    except BaseException:
        keep(asyncio.create_task(sandbox.close()))
        raise
