"""Live replay: a trace's trajectories as coroutines of one client, against a running stack.

Each trajectory does what its rollout did: gets an environment, thinks (think times divided by `speed`), submits a
step's actions together, waits for all, thinks again. A recorded command is run; an action without one takes its
`work_s` with as many processes as it is granted cores, and burns its `cpu_s` of that. What is measured is what a trainer would see.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from redis import Redis

from app.journal.models import Action as JournaledAction
from app.replay.scripts import starting_files
from scheduler.sim.recorded import action_of, opening_of
from scheduler.sim.summary import ActionRecord
from scheduler.sim.trace import Step, Trace, TraceAction, Trajectory
from tangram.action import Action
from tangram.aio import AsyncClient
from tangram.blobs import Blobs
from tangram.elasticity import Amdahl, Table
from tangram.errors import ActionError, ClientClosed, ResultNotReady
from tangram.results import ExecResult
from tangram.settings import Settings
from tangram.wire import BLOB_TTL_S, SHARED_BLOB_KEY_PREFIX

BURN = Path(__file__).with_name("burn.py")
BURN_INSIDE = ".tangram-burn.py"
"""Where an environment has that program, whatever it is made of; it needs a python3 on the PATH."""

DIRECT = shlex.quote(str(Path(sys.executable).resolve().parent))
"""Where that python3 is looked for first. One of a version manager takes longer to start than many commands. A container may lack it."""

WRITTEN_INSIDE = ".tangram-written"
"""What is written where a trace does not name the file."""

PLACEHOLDER = "{demo}"
CLOSE_WAIT_S = 30.0
WATCH_S = 0.5


class StartingFiles(NamedTuple):
    """What an environment starts with: the files of a folder, if one is named, and the program that burns where it is needed."""

    folder: str | None
    burns: bool

    @classmethod
    def of(cls, trajectory: Trajectory) -> StartingFiles:
        """Return what the environment of a trajectory starts with."""
        folder = str(trajectory.extra["files"]) if "files" in trajectory.extra else None
        return cls(folder, any(_needs_burn(action) for action in trajectory.actions()))

    def files(self, beside: Path) -> dict[str, bytes]:
        """Return the contents by path; the folder lies in `beside`. Raises `TraceError`."""
        found = dict(starting_files(beside / self.folder)) if self.folder is not None else {}
        return found | ({BURN_INSIDE: BURN.read_bytes()} if self.burns else {})


@dataclass(slots=True)
class LiveRun:
    """What a live replay saw."""

    records: list[ActionRecord]
    first_arrival: float
    last_result: float
    opened: dict[str, str]


class LiveReplay:
    """One live replay. `folder` is where relative paths of the trace start, `api_url` stands for `{demo}`.

    `check` is called now and then and raises when the stack is broken; `known_durations` says whether actions declare the
    recorded durations. With `pretend`, services are played by stubs, which take as long as was recorded.
    """

    def __init__(
        self,
        trace: Trace,
        settings: Settings,
        store: Redis,
        *,
        folder: Path,
        api_url: str,
        speed: float = 1.0,
        pretend: bool = False,
        run_name: str = "",
        known_durations: bool = True,
        progress: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._trace = trace
        self._settings = settings
        self._blobs = Blobs(store, ttl_s=BLOB_TTL_S * 6, prefix=SHARED_BLOB_KEY_PREFIX)
        self._folder = folder
        self._api_url = api_url
        self._speed = speed
        self._pretend = pretend
        self._run_name = run_name
        self._known_durations = known_durations
        self._progress = progress
        self._check = check
        self._files: dict[StartingFiles, Any] = {}
        self._records: list[ActionRecord] = []
        self._opened: dict[str, str] = {}
        self._is_broken = False
        # Every action is built before anything is sent.
        self._prepared = [[self._prepare_step(trajectory, step) for step in trajectory.steps] for trajectory in trace.trajectories]

    def run(self) -> LiveRun:
        """Replay to the last result."""
        return asyncio.run(self._run())

    async def _run(self) -> LiveRun:
        async with AsyncClient(settings=self._settings) as client:
            began = time.time()
            tasks = [
                asyncio.ensure_future(self._trajectory(client, number, trajectory, began))
                for number, trajectory in enumerate(self._trace.trajectories)
            ]
            either: list[asyncio.Future[Any]] = [asyncio.gather(*tasks), asyncio.ensure_future(self._watch())]
            try:
                done, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                self._is_broken = either[1] in done
                await done.pop()
            finally:
                for future in (*tasks, *either):
                    future.cancel()
                await asyncio.gather(*tasks, *either, return_exceptions=True)
        last = max((record.ended_at for record in self._records), default=began)
        first = began + min((trajectory.arrival_s for trajectory in self._trace.trajectories), default=0.0)
        return LiveRun(self._records, first, last, self._opened)

    async def _watch(self) -> None:
        """Raise when the stack under the replay breaks: its results would be waited for in vain."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._check()

    async def _trajectory(self, client: AsyncClient, number: int, trajectory: Trajectory, began: float) -> None:
        await asyncio.sleep(began + trajectory.arrival_s - time.time())
        environment = f"{self._run_name}-{number}" if self._run_name else f"replay-{number}"
        opening = opening_of(trajectory, environment)
        if opening is None:
            await self._steps(client, number, trajectory, None)
            return
        arguments: dict[str, Any] = {"environment": environment}
        if trajectory.memory_mb:
            arguments["memory_mb"] = trajectory.memory_mb
        files = self._starting_files(trajectory)
        if files is not None:
            arguments["files"] = files
        handle = await client.submit(opening.with_arguments(**arguments))
        self._opened[handle.id] = f"{number}.0.0"
        try:
            await handle
        except ActionError as error:
            self._refuse_all(number, trajectory, error)
            return
        try:
            await self._steps(client, number, trajectory, environment)
        finally:
            if not self._is_broken:  # else the environment ends with its stack, and nobody answers
                closing = Action(kind="cpu.close", environment=environment, job=trajectory.job, trajectory=trajectory.trajectory)
                await asyncio.shield(self._close(client, closing.with_arguments(environment=environment)))

    async def _close(self, client: AsyncClient, closing: Action) -> None:
        # Lost is as good as closed, a late close is not waited for, and the client of an interrupted replay closes what it has opened.
        with contextlib.suppress(ActionError, ResultNotReady, ClientClosed):
            await (await client.submit(closing)).result(timeout_s=CLOSE_WAIT_S)

    async def _steps(self, client: AsyncClient, number: int, trajectory: Trajectory, environment: str | None) -> None:
        for index, step in enumerate(trajectory.steps):
            await asyncio.sleep(step.think_s / self._speed)
            prepared = self._prepared[number][index]
            actions = [(recorded, self._bind(action, environment)) for recorded, action in zip(step.actions, prepared, strict=True)]
            await asyncio.gather(
                *(self._one(client, f"{number}.{index}.{place}", recorded, action) for place, (recorded, action) in enumerate(actions))
            )

    async def _one(self, client: AsyncClient, name: str, recorded: TraceAction, action: Action) -> None:
        submitted, began = time.time(), time.perf_counter()
        status, reason, result, task_id = "succeeded", "", None, ""
        try:
            handle = await client.submit(action)
            task_id = handle.id
            result = await handle
        except ActionError as error:
            status, reason = error.status, error.reason
        total_s = time.perf_counter() - began
        act = getattr(result, "act", None)
        status = result.status if isinstance(result, ExecResult) else status
        queue_s, background_s, execution_s = (act.queue_s, act.background_s, act.execution_s) if act is not None else (0.0, 0.0, 0.0)
        units = getattr(result, "dop", 0)
        self._records.append(
            ActionRecord(
                id=name,
                task_id=task_id,
                job=action.job,
                trajectory=action.trajectory,
                kind=action.kind,
                status=status,
                submitted_at=submitted,
                ended_at=time.time(),
                queue_s=queue_s,
                background_s=background_s,
                overhead_s=total_s - queue_s - background_s - execution_s,
                execution_s=execution_s,
                units=units,
                floor_s=recorded.floor_s,
                unit_seconds=units * execution_s,
                cpu_s=getattr(result, "cpu_s", 0.0),
                reason=reason or getattr(result, "reason", ""),
            )
        )
        self._progress()

    def _refuse_all(self, number: int, trajectory: Trajectory, error: ActionError) -> None:
        now = time.time()
        for index, step in enumerate(trajectory.steps):
            for place, recorded in enumerate(step.actions):
                self._records.append(
                    ActionRecord(
                        id=f"{number}.{index}.{place}",
                        job=trajectory.job,
                        trajectory=trajectory.trajectory,
                        kind=recorded.kind,
                        status="rejected",
                        submitted_at=now,
                        ended_at=now,
                        floor_s=recorded.floor_s,
                        reason=f"no environment: {error.reason}",
                    )
                )
                self._progress()

    # What is submitted

    def _prepare_step(self, trajectory: Trajectory, step: Step) -> list[Action]:
        prepared = []
        for place, recorded in enumerate(map(_replayed, step.actions)):
            session = "main" if place == 0 else f"parallel-{place}"
            action = action_of(recorded, trajectory, environment="to-be-opened", session=session, known_durations=self._known_durations)
            prepared.append(replace(action, arguments=self._arguments(recorded, session)))
        return prepared

    def _bind(self, action: Action, environment: str | None) -> Action:
        """Fill in the environment."""
        if not action.kind.startswith("cpu."):
            return action
        return replace(action, environment=environment, arguments={**action.arguments, "environment": environment})

    def _arguments(self, recorded: TraceAction, session: str) -> dict[str, Any]:
        if recorded.kind == "cpu.exec":
            return {"session": session, "command": recorded.command or burn_command(recorded)}
        if recorded.kind in ("cpu.read_file", "cpu.write_file"):
            return self._file_arguments(recorded)
        if recorded.kind == "cpu.request":
            return {name: recorded.extra[name] for name in ("port", "path", "method") if name in recorded.extra}
        if recorded.kind == "api.call":
            url = str(recorded.extra.get("url") or f"{PLACEHOLDER}/work?seconds={recorded.work_s}")
            method = str(recorded.extra.get("method", "GET"))
            return {"quota": recorded.quota, "method": method, "url": url.replace(PLACEHOLDER, self._api_url)}
        return self._service_arguments(recorded)

    @staticmethod
    def _file_arguments(recorded: TraceAction) -> dict[str, Any]:
        path = recorded.extra.get("path")
        if recorded.kind == "cpu.read_file":
            return {"path": path if isinstance(path, str) else BURN_INSIDE}
        return {"path": path if isinstance(path, str) else WRITTEN_INSIDE, "data": str(recorded.extra.get("text", "")).encode()}

    def _service_arguments(self, recorded: TraceAction) -> dict[str, Any]:
        argument, recorded_as, dummy = {
            "gpu.score": ("items", "items", [{"prompt": "", "response": ""}]),
            "gpu.logprobs": ("token_ids", "sequences", [[1, 2, 3]]),
            "gpu.generate": ("prompts", "prompts", [""]),
        }[recorded.kind]
        arguments: dict[str, Any] = {"service": recorded.service}
        arguments[argument] = recorded.extra.get(recorded_as, dummy)
        if self._pretend or recorded_as not in recorded.extra:
            # The stub engine takes as long as was recorded; an engine with a model refuses to.
            arguments["work_s"] = recorded.work_s
        return arguments

    def _starting_files(self, trajectory: Trajectory) -> Any:
        """Return the files that a trajectory's environment starts with; None where it starts with none."""
        start = StartingFiles.of(trajectory)
        if start == StartingFiles(None, False):
            return None
        if start not in self._files:
            listed = {path: base64.b64encode(content).decode("ascii") for path, content in start.files(self._folder).items()}
            self._files[start] = self._blobs.put_text(json.dumps(listed))
        return self._files[start]


def _replayed(recorded: TraceAction) -> TraceAction:
    """Return the action that is submitted for a recorded one: for a request that names no port, a command that computes for as long."""
    return replace(recorded, kind="cpu.exec") if recorded.kind == "cpu.request" and "port" not in recorded.extra else recorded


def _needs_burn(recorded: TraceAction) -> bool:
    """Return whether an action uses the program that burns: to run it, or as a file to read where the trace names none."""
    action = _replayed(recorded)
    return (action.kind == "cpu.exec" and not action.command) or (action.kind == "cpu.read_file" and "path" not in action.extra)


def burn_command(recorded: TraceAction) -> str:
    """Return a command that uses as much CPU and memory as the action was recorded with."""
    curve = recorded.elasticity.curve
    memory = "" if recorded.memory_mb is None else f" {recorded.memory_mb} {recorded.resident_mb or 0}"
    burn = f'PATH={DIRECT}:"$PATH" python3 -S -E "$HOME/{BURN_INSIDE}"'
    dop, most = "${TANGRAM_DOP:-1}", max(recorded.elasticity.units)
    if isinstance(curve, Table):
        # E(m) point by point is work that grows with m: each of m processes burns work_s / (E(m) · m).
        cases = " ".join(f"{units}) w={recorded.work_s / value:.6f};;" for units, value in curve.efficiency)
        return f'case "{dop}" in {cases} *) w={recorded.work_s:.6f};; esac; {burn} "$w" "{dop}" 1 {most} {recorded.busy:.6f}{memory}'
    if recorded.busy > 1.0:  # no curve, and several cores all the time: a process for each of them
        return f'{burn} {recorded.work_s * most:.6f} "{dop}" 1 {most} {recorded.busy / most:.6f}{memory}'
    fraction = curve.parallel_fraction if isinstance(curve, Amdahl) else 0
    return f'{burn} {recorded.work_s:.6f} "{dop}" {fraction} {most} {recorded.busy:.6f}{memory}'


def with_journal(run: LiveRun, journaled: Mapping[str, JournaledAction]) -> list[ActionRecord]:
    """Complete the records of a run from its journal, which knows the waits of actions, and what their grants held.

    Unit-seconds come from there, since a client does not see resizes. A trajectory's wait for its environment counts
    as a wait of its first action.
    """
    waits = {first: journaled[open_id].queue_s or 0.0 for open_id, first in run.opened.items() if open_id in journaled}
    completed = []
    for record in run.records:
        wait = waits.get(record.id, 0.0)
        known = journaled.get(record.task_id)
        completed.append(
            replace(
                record,
                queue_s=record.queue_s + wait,
                submitted_at=record.submitted_at - wait,
                unit_seconds=known.unit_s or 0.0 if known is not None else record.unit_seconds,
            )
        )
    return completed
