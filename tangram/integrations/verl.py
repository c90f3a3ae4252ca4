"""verl: a tool with an environment for each rollout, and an agent loop that starts a rollout anew when the stack has failed in it.

verl calls `create`, `execute` and `release` around every call of a tool. It shows the text of an exception in `execute` to the model, which
is then scored for what it made of that. So an environment belongs to the rollout (`agent_data`) and not to a call. A failure of the stack
is raised in `release`, where verl lets it pass: `RolloutFailed` ends the rollout.

| agent loop | then |
|---|---|
| `tangram_tool_agent`, the one here | the rollout is started anew in another environment, twice at most |
| verl's `tool_agent`, or after that | `RolloutFailed` stops the training step. Nothing is scored |
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import weakref
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from tangram.errors import InvalidAction, TangramError
from tangram.integrations.sandbox import Sandbox, borrow_client, keep
from tangram.results import LEFT_OUT, ExecResult

ATTEMPTS = 3
"""How often a rollout is begun at most."""

KEPT = "tangram"
"""The extra field of a rollout that names an environment which is kept for scoring: `job`, `trajectory`, `environment`."""

_log = logging.getLogger(__name__)
_failures: ContextVar[list[TangramError] | None] = ContextVar("tangram_failures", default=None)


class RolloutFailed(TangramError):
    """Raised when the stack has failed in a rollout, whose outcome then says nothing of the model."""


def note_failure(error: TangramError) -> None:
    """Have the rollout of this coroutine started anew; without effect outside `tangram_tool_agent`."""
    failures = _failures.get()
    if failures is not None:
        failures.append(error)


class SandboxTool(BaseTool):  # type: ignore[misc]  # verl has no types
    """A shell of an environment that stands from the first call of a rollout to the rollout's end.

    The parameter `command` of the tool is what runs; folder and variables stay from one call to the next.

    Parameters, as `config` of the tool
    -----------------------------------
    job, image, memory_mb
        As in `Client.open`; `verl`, none and none by default.
    timeout_s
        Seconds that a command may take, 60 by default. One that takes longer is ended, and what it printed is the answer.
    units
        Acceptable numbers of cores of a command, `[1]` by default.
    setup
        A command that runs first in each environment. `create_kwargs` of a sample can name another one, and another `image`.
    keep_for_scoring
        Whether the environment is left standing for `tangram.integrations.verl_reward`, which closes it.

    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(dict(config), tool_schema or _schema())
        self._rollouts: WeakKeyDictionary[Any, _Rollout] = WeakKeyDictionary()
        self._samples: dict[str, dict[str, Any]] = {}
        self._failed: dict[str, TangramError] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Name a call; the environment is opened by the first one that executes."""
        instance_id = instance_id or secrets.token_hex(8)
        self._samples[instance_id] = dict(kwargs.get("create_kwargs") or {})
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run the command in the environment of `agent_data`, and return its output, no reward, and its exit code."""
        try:
            rollout = await self._rollout(kwargs["agent_data"], self._samples.get(instance_id, {}))
            done = await rollout.run(str(parameters.get("command", "")))
        except InvalidAction:
            raise  # the model's words, which verl answers with the text of this error
        except TangramError as error:
            note_failure(error)
            self._failed[instance_id] = error
            if (failed := self._rollouts.get(kwargs["agent_data"])) is not None and failed.kept:
                failed.close_soon()
            raise
        return ToolResponse(text=_text(done)), 0.0, {"exit_code": done.exit_code}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a call. Raises `RolloutFailed` where the stack has failed in it."""
        self._samples.pop(instance_id, None)
        error = self._failed.pop(instance_id, None)
        if error is not None:
            raise RolloutFailed(f"the stack failed in a rollout: {error}") from error

    async def _rollout(self, agent_data: Any, sample: dict[str, Any]) -> _Rollout:
        rollout = self._rollouts.get(agent_data)
        if rollout is None:
            rollout = self._rollouts[agent_data] = _Rollout({**self.config, **sample})
            if not rollout.kept:
                weakref.finalize(agent_data, rollout.close_soon).atexit = False  # then the client closes it
        place = await rollout.open(f"verl-{agent_data.request_id}")
        if rollout.kept:
            agent_data.extra_fields[KEPT] = place
        return rollout


class SandboxToolAgentLoop(ToolAgentLoop):  # type: ignore[misc]  # verl has no types
    """verl's own tool agent loop, begun anew when the stack has failed. Register it with `agent_loop_config_path`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run a rollout. Raises `RolloutFailed` when the stack has failed in `ATTEMPTS` of them."""
        failures: list[TangramError] = []
        for attempt in range(1, ATTEMPTS + 1):
            failures.clear()
            token = _failures.set(failures)
            try:
                output = await super().run(sampling_params, **kwargs)
            except RolloutFailed as error:
                failures.append(error)
            finally:
                _failures.reset(token)
            if not failures:
                return output
            _log.warning("attempt %d of %d at a rollout failed: %s", attempt, ATTEMPTS, failures[0])
            if attempt < ATTEMPTS:
                await asyncio.sleep(random.uniform(0.0, attempt))  # not all rollouts of a lost node at once
        raise RolloutFailed(f"the stack failed in {ATTEMPTS} attempts at a rollout: {failures[0]}") from failures[0]


register("tangram_tool_agent")(SandboxToolAgentLoop)


class _Rollout:
    """The environment of one rollout."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()
        self._sandbox: Sandbox | None = None
        self.kept = bool(config.get("keep_for_scoring"))

    async def open(self, trajectory: str) -> dict[str, str]:
        async with self._opening:
            if self._sandbox is None:
                config = self._config
                sandbox = await Sandbox.open(
                    borrow_client(config.get("job", "verl")),
                    trajectory=trajectory,
                    image=config.get("image"),
                    memory_mb=config.get("memory_mb"),
                    detached=self.kept,
                )
                self._sandbox = sandbox
                if config.get("setup"):
                    done = await self.run(config["setup"])
                    if done.exit_code != 0:
                        raise RolloutFailed(f"the setup of environment {sandbox.id} failed: {done.stderr[-500:]}")
            place = self._sandbox.place
            return {"job": place.job, "trajectory": place.trajectory, "environment": place.environment}

    async def run(self, command: str) -> ExecResult:
        assert self._sandbox is not None, "opened before"
        if not command.strip():
            raise ValueError("the parameter `command` is missing")
        timeout_s, units = self._config.get("timeout_s", 60.0), tuple(self._config.get("units", (1,)))
        return await self._sandbox.exec_in_session(command, timeout_s=timeout_s, units=units)

    def close_soon(self) -> None:
        """Close it once its rollout is forgotten, which may be found out by any thread."""
        sandbox, loop = self._sandbox, self._loop
        if sandbox is not None and not loop.is_closed():
            loop.call_soon_threadsafe(lambda: keep(loop.create_task(sandbox.close())))


def _text(done: ExecResult) -> str:
    ended = f"[ended: {done.reason or 'its time was over'}]" if done.exit_code is None else f"[exit code {done.exit_code}]"
    remark = done.remark if done.exit_code is not None else LEFT_OUT if done.truncated else ""
    parts = (done.stdout, done.stderr, f"[{remark}]" if remark else "", ended if done.exit_code != 0 else "")
    return "\n".join(part.rstrip("\n") for part in parts if part)


def _schema() -> OpenAIFunctionToolSchema:
    command = {"type": "string", "description": "The command, for bash."}
    function = {
        "name": "bash",
        "description": "Run a command in a sandbox and return what it prints. Files, folder and variables stay between calls.",
        "parameters": {"type": "object", "properties": {"command": command}, "required": ["command"]},
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
