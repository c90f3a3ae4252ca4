"""`tangram record`: scripted rollouts carried out live, in environments of a running stack or one started for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.replay.live_trainer import PLACEHOLDER
from app.replay.outside_api import OutsideApi
from app.replay.recorder import Outcome, record_trace, shared_header
from app.replay.replay_command import Begin, ReplayOptions, running_or_own
from app.replay.scripts import Script, action_text
from scheduler.sim.trace import Trace, TraceAction
from tangram.client import Client, Environment
from tangram.settings import Settings


class LiveExecutor:
    """Carries out one script's actions through a client; commands on the cores they ask for at least."""

    def __init__(self, client: Client, environment: Environment, api_url: str, *, pretends: bool) -> None:
        self._client = client
        self._pretends = pretends
        self._environment = environment
        self._api_url = api_url

    def upload(self, path: str, content: bytes) -> None:
        """Put a starting file into the environment."""
        self._environment.write_file(path, content)

    def exec(self, command: str, *, units: int, timeout_s: float) -> Outcome:
        """Run a command on `units` cores."""
        done = self._environment.exec(command, units=[units], timeout_s=timeout_s)
        code = done.exit_code if done.exit_code is not None else -1
        return Outcome(execution_s=done.act.execution_s, cpu_s=done.cpu_s, exit_code=code, output=done.stdout + done.stderr + done.reason)

    def read_file(self, path: str) -> Outcome:
        """Read a file."""
        return _timed(lambda: self._environment.read_file(path))

    def write_file(self, path: str, content: bytes) -> Outcome:
        """Write a file."""
        return _timed(lambda: self._environment.write_file(path, content))

    def outside(self, action: TraceAction) -> Outcome | None:
        """Ask a service or an API; a service that is played by a stub has no time of its own, and None is returned."""
        if action.kind == "api.call":
            url = action_text(action, "url").replace(PLACEHOLDER, self._api_url)
            answer = self._client.call(action.quota or "", url=url, method=str(action.extra.get("method", "GET")))
            return Outcome(execution_s=answer.act.execution_s)
        if self._pretends:
            return None
        service = action.service or ""
        if action.kind == "gpu.score":
            return Outcome(execution_s=self._client.score(service, _listed(action, "items")).act.execution_s)
        if action.kind == "gpu.logprobs":
            return Outcome(execution_s=self._client.logprobs(service, _listed(action, "sequences")).act.execution_s)
        return Outcome(execution_s=self._client.generate(service, _listed(action, "prompts")).act.execution_s)


def record_live(
    scripts: Sequence[Script],
    settings: Settings,
    relative_to: Path,
    begin: Begin,
    say: Callable[[str], None],
) -> Trace:
    """Record `scripts` as one trace whose `files` are relative to the folder `relative_to`."""
    every = replace(shared_header(scripts), trajectories=tuple(script.trajectory for script in scripts))
    with ExitStack() as exit_stack:
        target = exit_stack.enter_context(running_or_own(every, ReplayOptions(policy="fcfs"), settings, say))
        outside = exit_stack.enter_context(OutsideApi())
        client = exit_stack.enter_context(Client(job="record", settings=target.settings))
        advance = begin(sum(len(script.trajectory.steps) for script in scripts))

        @contextmanager
        def open_executor(script: Script) -> Iterator[LiveExecutor]:
            with client.open(trajectory=script.trajectory.trajectory) as environment:
                yield LiveExecutor(client, environment, outside.base_url, pretends=target.pretends)

        return record_trace(scripts, open_executor, relative_to, lambda step: advance())


def _timed(act: Callable[[], object]) -> Outcome:
    began = time.perf_counter()
    act()
    return Outcome(execution_s=time.perf_counter() - began)


def _listed(action: TraceAction, key: str) -> list[Any]:
    given = action.extra.get(key)
    return given if isinstance(given, list) else []
