"""Harbor: an environment class, named by `--env tangram.integrations.harbor:TangramEnvironment`.

Harbor's tasks need their image and folders at the root (`/logs`, `/tests`, `/solution`), so environments are containers. Images are not
built here: a task names one that is there (`docker_image`, or `--ek image=…`). The user that commands run as (`TANGRAM_CONTAINER_USER`)
must be able to write to these folders in it, and it must have `bash` and `tar`. Tasks that need no image also run in process sandboxes that
are set apart (`--ek isolation=bubblewrap`), which have the folders.

A failure of the stack is raised. Harbor writes it down as the trial's exception: such a trial has no reward.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.paths import EnvironmentPaths

from tangram.integrations.sandbox import Sandbox, borrow_client, return_client

LONGEST_COMMAND_S = 24 * 3600.0
"""Harbor ends phases by itself; a command of which it names no limit gets this one."""

TIMED_OUT = 124

CONTAINER, ISOLATIONS = "container", ("container", "bubblewrap", "view")

_WORKDIR = re.compile(r"^\s*WORKDIR\s+(/\S*)", re.MULTILINE | re.IGNORECASE)


class ImageUnfit(RuntimeError):
    """Raised when the image of a task does not let Harbor's folders be made."""


class TangramEnvironment(BaseEnvironment):  # type: ignore[misc]  # Harbor is not there for the type checker
    """An environment of the stack for one trial.

    Parameters, as `--ek NAME=VALUE`
    --------------------------------
    job
        The job that its actions belong to, `harbor` by default.
    image
        Image of all tasks, in the place of their `docker_image`.
    isolation
        How environments are set apart: `container`, else `bubblewrap` or `view`. These have no images: a task's is not used.
    no_network
        Whether the containers of this stack have no network. Only then are tasks taken that ask for none. Other environments have none.
    detached
        Whether an environment that Harbor is not to delete stays, until its lease is over.

    """

    def __init__(
        self,
        *args: Any,
        job: str = "harbor",
        image: str | None = None,
        isolation: str = CONTAINER,
        no_network: bool = False,
        detached: bool = False,
        **kwargs: Any,
    ) -> None:
        if isolation not in ISOLATIONS:
            raise ValueError(f"isolation={isolation}: it is one of {', '.join(ISOLATIONS)}")
        self._job, self._image, self._isolation, self._detached = job, image, isolation, detached
        self._no_network = no_network or isolation != CONTAINER
        self._sandbox: Sandbox | None = None
        self._client: Any = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """Return how Harbor's messages call it."""
        return "tangram"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """Return what it can do: of what Harbor asks, only to have no network."""
        return EnvironmentCapabilities(disable_internet=self._no_network)

    def _validate_definition(self) -> None:
        if self._isolation == CONTAINER and not self._task_image:
            raise FileNotFoundError(
                f"task {self.environment_name} names no image: build its {self.environment_dir.name}/Dockerfile, push it, and name it as "
                "`docker_image` in task.toml or with --ek image=…"
            )

    async def start(self, force_build: bool) -> None:
        """Open the environment, and make the folders that Harbor writes to. Raises also `ImageUnfit`."""
        self._client = borrow_client(self._job)
        self._sandbox = await Sandbox.open(
            self._client,
            trajectory=self.session_id,
            image=self._task_image if self._isolation == CONTAINER else None,
            image_needed=True,
            memory_mb=self._effective_memory_mb,
            requires=(f"isolation:{self._isolation}",),
            detached=self._detached,
        )
        self.logger.debug(f"environment {self._sandbox.id} of job {self._job}")
        paths = EnvironmentPaths.for_os(self.os)
        folders = [paths.agent_dir, paths.verifier_dir, paths.artifacts_dir, paths.tests_dir, paths.solution_dir]
        made = await self.exec(self._ensure_dirs_command([*self._mount_targets(writable_only=True), *folders], chmod=False), cwd="/")
        if made.return_code != 0:
            raise ImageUnfit(
                f"image {self._task_image} lets the user of commands not write to Harbor's folders; add to its Dockerfile: "
                f"RUN mkdir -m 777 -p /logs /tests /solution ({(made.stderr or '').strip()})"
            )
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        """Close the environment. One that is not to be deleted stays only where it was opened `detached`."""
        client, sandbox = self._client, self._sandbox
        self._client = self._sandbox = None
        if client is None:
            return
        try:
            if sandbox is not None and (delete or not self._detached):
                await sandbox.close()
        finally:
            await return_client(client)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command as the user of the container, which `root` stands for here. Raises `ValueError` for other users.

        Its output is whole, or the call raises `SubmissionCut`. Output of a command that a limit has ended may be truncated. The end of
        standard error says so.
        """
        if (wanted := self._resolve_user(user)) not in (None, "root", 0):
            raise ValueError(f"commands run as the user of the container: none can run as {wanted!r}")
        done = await self._opened.exec(
            command,
            cwd=cwd or self._workdir,
            variables=self._merge_env(env),
            timeout_s=timeout_sec or LONGEST_COMMAND_S,
            units=self._units,
            whole=True,
        )
        code = TIMED_OUT if done.exit_code is None else done.exit_code
        return ExecResult(stdout=done.stdout, stderr=done.stderr_and_remark, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Bring a file into the environment."""
        await self._opened.upload(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Bring the contents of a folder into the environment."""
        await self._opened.upload(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Fetch a file. Raises `FileNotFoundError`."""
        await self._opened.download(source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Fetch the contents of a folder. Raises `FileNotFoundError`."""
        await self._opened.download(source_dir, target_dir)

    @property
    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("the environment was not started, or was stopped")
        return self._sandbox

    @property
    def _task_image(self) -> str | None:
        image: str | None = self._image or self.task_env_config.docker_image
        return image

    @property
    def _workdir(self) -> str:
        if self.task_env_config.workdir:
            return str(self.task_env_config.workdir)
        dockerfile = self.environment_dir / "Dockerfile"
        folders = _WORKDIR.findall(dockerfile.read_text(encoding="utf-8")) if dockerfile.is_file() else []
        return folders[-1] if folders else "/"

    @property
    def _units(self) -> tuple[int, ...]:
        """All numbers of cores up to the task's: commands start on what is there, and grow."""
        return tuple(range(1, max(1, int(self._effective_cpus or 1)) + 1))
