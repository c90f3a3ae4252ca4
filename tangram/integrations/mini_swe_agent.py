"""mini-swe-agent: an environment class, named by `environment_class: tangram.integrations.mini_swe_agent.TangramEnvironment`.

A command that fails or runs out of time is an observation, as in the classes of mini-swe-agent. A failure of the stack is raised: the agent
ends with the error's name as its exit status and without a submission, so nothing is there to be scored.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import subprocess
from pathlib import Path
from typing import Any

from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel

from tangram.action import command_class
from tangram.calls import Place
from tangram.client import Client, Environment
from tangram.errors import ActionError, ActionRejected, InvalidAction
from tangram.files import drive
from tangram.integrations import actions
from tangram.integrations.sandbox import ended_by_program, whole_submission
from tangram.results import FINISHED, ExecResult
from tangram.settings import Settings
from tangram.wire import CONTAINERS

_log = logging.getLogger(__name__)


class TangramEnvironmentConfig(BaseModel):
    """What an environment is opened with; the names of mini-swe-agent's Docker environment mean the same here."""

    image: str | None = None
    """Image of the container; only a label where no node has containers."""
    cwd: str = ""
    """Folder in which commands start; by default the environment's own."""
    env: dict[str, str] = {}
    """Environment variables of all commands."""
    forward_env: list[str] = []
    """Names of variables of this process that commands are to have, where they are set; `env` goes first."""
    timeout: float = 30
    """Seconds that a command may take from its start; waiting for cores does not count."""
    interpreter: list[str] = ["bash", "-lc"]
    """What runs a command, which is its last argument."""
    job: str = "mini-swe-agent"
    """The job that its actions belong to."""
    trajectory: str = ""
    """The rollout; a name is made up where none is given."""
    memory_mb: int | None = None
    """Memory that is reserved for it, MB."""
    units: list[int] = [1]
    """Acceptable numbers of cores of a command."""


class TangramEnvironment:
    """An environment of the stack for one run of an agent."""

    def __init__(self, *, settings: Settings | None = None, **config: Any) -> None:
        """Open it and wait for it; raises the errors of `Client` and `Client.open`."""
        self.config = TangramEnvironmentConfig(**config)
        self._client = Client(self.config.job, settings)
        try:
            self._environment = self._open()
        except BaseException:
            self._client.close()
            raise

    @property
    def id(self) -> str:
        """The environment's id."""
        return self._environment.id

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run the command of an action in a shell of its own.

        Raises `Submitted` when the command says that the task is done; `ActionError` or `StackUnreachable` when the stack failed, of these
        `EnvironmentLost` where it has lost the environment; `SubmissionCut` when the command submits more than 64 MiB, or the result store
        has not kept all of it.
        """
        forwarded = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        timeout = timeout or self.config.timeout
        command = action.get("command", "")
        try:
            handle = self._environment.submit(
                command,
                stream=True,
                cwd=cwd or self.config.cwd,
                interpreter=self.config.interpreter,
                merged=True,
                timeout_s=timeout,
                units=self.config.units,
                variables=forwarded | self.config.env,
                action_class=command_class(command),
            )
            done = whole_submission(handle)
        except InvalidAction as error:
            return _failed(error, "")
        except ActionError as error:
            done = ended_by_program(error)
        output = _observation(done, command, timeout)
        _check_finished(output)
        return output

    def upload(self, source: Path | str, target: str = "") -> None:
        """Bring a file, or the contents of a folder, into the environment; by default to where commands start."""
        place = Place(self._client.job, self._environment.trajectory, self._environment.id)
        transfer = actions.upload(place, actions.read_local(Path(source)), target or self.config.cwd or ".")
        drive(transfer, lambda action: self._client.submit(action).result())

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Return what prompts may name: the configuration, and the machine that the client runs on."""
        variables: dict[str, Any] = recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)
        return variables

    def serialize(self) -> dict[str, Any]:
        """Return what a saved trajectory says of it."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = {"environment": self.config.model_dump(mode="json"), "environment_type": kind}
        return {"info": {"config": config, "tangram": {"environment": self.id, "job": self.config.job}}}

    def cleanup(self) -> None:
        """Close the environment and the client. Idempotent."""
        self._client.close()

    def __enter__(self) -> TangramEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def _open(self) -> Environment:
        config = self.config
        trajectory = config.trajectory or f"mini-{secrets.token_hex(8)}"
        if config.image is not None:
            try:
                return self._client.open(trajectory=trajectory, image=config.image, memory_mb=config.memory_mb, requires=(CONTAINERS,))
            except ActionRejected as error:
                if not actions.lacks_containers(error):
                    raise
                _log.warning("no node has containers: image %s is a label only", config.image)
        return self._client.open(trajectory=trajectory, memory_mb=config.memory_mb)


def _observation(done: ExecResult, command: str, timeout_s: float) -> dict[str, Any]:
    """Return what the agent sees; its last line says where output is truncated, and what limit has ended the command."""
    printed = f"{done.stdout}\n[{done.remark}]\n" if done.remark else done.stdout
    if done.exit_code is not None:
        return {"output": printed, "returncode": done.exit_code, "exception_info": ""}
    return _failed(subprocess.TimeoutExpired(command[:200], timeout_s), printed)


def _failed(error: Exception, printed: str) -> dict[str, Any]:
    """Return what mini-swe-agent's own environments make of a command that they could not run to its end."""
    return {
        "output": printed,
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {error}",
        "extra": {"exception_type": type(error).__name__, "exception": str(error)},
    }


def _check_finished(output: dict[str, Any]) -> None:
    lines = output["output"].lstrip().splitlines(keepends=True)
    if lines and lines[0].strip() == FINISHED and output["returncode"] == 0:
        submission = "".join(lines[1:])
        raise Submitted({"role": "exit", "content": submission, "extra": {"exit_status": "Submitted", "submission": submission}})
