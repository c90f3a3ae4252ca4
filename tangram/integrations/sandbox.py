"""One environment for coroutines, with the words that sandboxes of other frameworks have in common.

An environment is opened here, or found by its id: it may have been opened by another process, such as an earlier `tangram-docker`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack
from weakref import WeakKeyDictionary

from tangram import calls
from tangram.action import Action
from tangram.aio import AsyncClient
from tangram.calls import ExecOptions, OpenOptions, Place
from tangram.errors import ActionError, ActionFailed, ActionLost, ActionRejected, ActionTimedOut, TangramError
from tangram.files import drive_async
from tangram.handles import AsyncHandle, Handle
from tangram.integrations import actions
from tangram.results import LEFT_OUT, Act, Chunk, ExecResult, SubmissionCut
from tangram.wire import CONTAINERS

MOST_PRINTED_BYTES = 64 << 20
"""The most output of a command that is kept whole, as much as a file may have."""
KILLED = 137
"""The exit code of what programs have brought to nothing, as shells have it for what was killed."""

_PROBE_S = 10.0

State = Literal["running", "closed", "lost", "unknown"]

_log = logging.getLogger(__name__)


class Sandbox:
    """An environment of a client that stands; commands of it run side by side, each in a shell of its own.

    All methods raise what `tangram.errors` says of actions. A command that fails or runs out of time is a result, and so is one that
    programs have brought to nothing, as by filling the memory or the disk of the environment: see `ended_by_program`.
    """

    def __init__(self, client: AsyncClient, place: Place) -> None:
        """Stand for the environment at `place`; makes no call."""
        self._client = client
        self.place = place
        self._busy: set[int] = set()
        self._end: asyncio.TimerHandle | None = None

    @property
    def id(self) -> str:
        """The environment's id."""
        return self.place.environment

    @classmethod
    async def open(
        cls,
        client: AsyncClient,
        *,
        trajectory: str,
        image: str | None = None,
        image_needed: bool = False,
        memory_mb: int | None = None,
        requires: Iterable[str] = (),
        detached: bool = False,
        timeout_s: float | None = None,
    ) -> Self:
        """Open an environment; see `Client.open`.

        Where no node has containers, an image is a label only and a warning says so, unless it is `image_needed`.
        """
        requires, labels = tuple(requires), () if image is None else (CONTAINERS,)
        options: OpenOptions = {"trajectory": trajectory, "memory_mb": memory_mb, "detached": detached, "timeout_s": timeout_s}
        options |= {"image": image, "requires": (*requires, *labels)}
        try:
            opened = await client.open(**options)
        except ActionRejected as error:
            if image is None or image_needed or not actions.lacks_containers(error):
                raise
            _log.warning("no node has containers: image %s is a label only", image)
            opened = await client.open(**(options | {"image": None, "requires": requires}))
        return cls(client, Place(client.job, trajectory, opened.id))

    async def exec(self, command: str, *, whole: bool = False, **options: Unpack[ExecOptions]) -> ExecResult:
        """Run a command in a shell of its own, as `docker exec` does; without an `interpreter` that is bash.

        Its result is `whole` where frameworks may read a patch or a verdict from it; see `run_whole`.
        """
        # The lowest number that is free: commands one after another are all in `main`.
        number = next(free for free in itertools.count() if free not in self._busy)
        self._busy.add(number)
        try:
            session = f"beside-{number}" if number else "main"
            how: ExecOptions = {"interpreter": ("bash", "-c"), **options, "session": session, "stream": whole}
            return await self._executed(calls.execute(self.place, command, **how), whole=whole)
        finally:
            self._busy.discard(number)

    async def exec_in_session(
        self, command: str, *, session: str = "shell", timeout_s: float | None = None, units: Sequence[int] = (1,), whole: bool = False
    ) -> ExecResult:
        """Run a command in a session: folder, variables and functions stay for its next one, which waits for the end of this one."""
        action = calls.execute(self.place, command, units=units, timeout_s=timeout_s, session=session, stream=whole)
        return await self._executed(action, whole=whole)

    async def _executed(self, action: Action, *, whole: bool) -> ExecResult:
        try:
            result: ExecResult = await (self.run_whole(action) if whole else self.run(action))
        except ActionError as error:
            return ended_by_program(error)
        return result

    async def read_file(self, path: str) -> bytes:
        """Return the bytes of a file; raises `ActionFailed` where there is none."""
        data: bytes = await self.run(calls.read_file(self.place, path))
        return data

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Write a file, its parent folders too; text as UTF-8."""
        await self.run(calls.write_file(self.place, path, data))

    async def upload(self, source: Path | str, target: str) -> None:
        """Bring a file, or the contents of a folder, to the path `target`. Raises also `TransferFailed`."""
        local = await asyncio.to_thread(actions.read_local, Path(source))
        await drive_async(actions.upload(self.place, local, target), self.run)

    async def download(self, source: str, target: Path | str) -> None:
        """Fetch a file, or the contents of a folder, to the path `target`. Raises also `TransferFailed`, `FileNotFoundError`."""
        packed = await drive_async(actions.download(self.place, source), self.run)
        await asyncio.to_thread(actions.write_local, packed, Path(target))

    async def close(self) -> None:
        """End its processes and throw its files away; one that is gone already is closed."""
        if self._end is not None:
            self._end.cancel()
        try:
            await self.run(calls.close_environment(self.place))
        except ActionError as error:
            if not actions.is_gone(error):
                raise

    async def run(self, action: Action) -> Any:
        """Submit an action and wait for its result."""
        return await (await self._client.submit(action))

    async def run_whole(self, action: Action) -> ExecResult:
        """Run a command with `stream` and return its result with all that it has printed, also where results hold less.

        A result of a command that a limit has ended may be truncated. Raises `SubmissionCut` where any other one is not whole.
        """
        handle: AsyncHandle[ExecResult] = await self._client.submit(action)
        reading = asyncio.create_task(_printed(handle))
        try:
            done = await handle
            if not done.truncated or done.exit_code is None:
                return done
            return (await reading).made_whole(done)
        finally:
            reading.cancel()

    async def state(self) -> State:
        """Return how it is. Raises nothing but `asyncio.CancelledError`."""
        probe = calls.execute(self.place, ":", session="state", timeout_s=_PROBE_S, queue_timeout_s=_PROBE_S, action_class="state")
        try:
            await self.run(probe)
        except ActionTimedOut:
            return "running"  # it waits for a core
        except ActionLost:
            return "lost"
        except ActionFailed as error:
            return "closed" if actions.is_gone(error) else "unknown"
        except TangramError:
            return "unknown"
        return "running"

    def end_after(self, seconds: float) -> None:
        """Close it after so many seconds, unless it is closed before."""
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(seconds, lambda: keep(loop.create_task(self.close())))


def ended_by_program(error: ActionError) -> ExecResult:
    """Return a result with the exit code `KILLED` where programs are at fault, even if the environment is lost by them; else raise it."""
    if error.fault != "program":
        raise error
    act = Act(queue_s=0.0, overhead_s=0.0, execution_s=0.0)
    ended = ExecResult(status=error.status, exit_code=KILLED, stdout="", stderr="", truncated=False, dop=0, act=act)
    return replace(ended, reason=error.reason, cause=error.cause)


def whole_submission(handle: Handle[ExecResult]) -> ExecResult:
    """Return the result of a command with `stream`; a submission of mini-swe-agent has all that was printed, also where results hold less.

    Raises `SubmissionCut` where a submission is not whole; else as `Handle.result`.
    """
    printed = _Printed()
    try:
        try:
            for chunk in handle.output():
                printed.take(chunk)
        except TangramError:
            printed.is_whole = False
        done = handle.result()
        try:
            return done.whole_submission()
        except SubmissionCut:
            return printed.made_whole(done)
    finally:
        handle.cancel()


async def _printed(handle: AsyncHandle[ExecResult]) -> _Printed:
    printed = _Printed()
    try:
        async for chunk in handle.output():
            printed.take(chunk)
    except TangramError:
        printed.is_whole = False
    return printed


class _Printed:
    """What a command prints, by stream, up to `MOST_PRINTED_BYTES`."""

    def __init__(self) -> None:
        self._streams, self.is_whole = {"stdout": bytearray(), "stderr": bytearray()}, True

    def take(self, chunk: Chunk) -> None:
        """Add a piece."""
        self._streams[chunk.stream] += chunk.data
        is_too_much = sum(map(len, self._streams.values())) > MOST_PRINTED_BYTES
        self.is_whole = self.is_whole and not chunk.dropped and not is_too_much
        if is_too_much:
            self._streams[chunk.stream].clear()  # it is read on, since the command must not wait for its reader

    def made_whole(self, done: ExecResult) -> ExecResult:
        """Return a result with all that was printed. Raises `SubmissionCut` where that was too much, or something of it is missing."""
        if not self.is_whole:
            raise SubmissionCut(f"the output is not whole: {LEFT_OUT}, and {MOST_PRINTED_BYTES} bytes are the most that pass")
        stdout, stderr = (self._streams[name].decode(errors="replace") for name in ("stdout", "stderr"))
        return replace(done, truncated=False, stdout=stdout, stderr=stderr)


_tasks: set[asyncio.Task[None]] = set()


def keep(task: asyncio.Task[None]) -> None:
    """Keep a task that closes an environment until it is done, and log its error: nobody waits for it."""
    _tasks.add(task)
    task.add_done_callback(_note_end)


def _note_end(task: asyncio.Task[None]) -> None:
    _tasks.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("an environment could not be closed and goes with its client or its lease: %s", error)


@dataclass
class _Shared:
    client: AsyncClient
    users: int = 0


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Shared]] = WeakKeyDictionary()


def borrow_client(job: str) -> AsyncClient:
    """Return the client that all sandboxes of a job share in this event loop; each `return_client` later gives it back.

    A client has two threads and some connections, and hundreds of sandboxes may stand at once.
    """
    shared = _shared.setdefault(asyncio.get_running_loop(), {}).setdefault(job, _Shared(AsyncClient(job)))
    shared.users += 1
    return shared.client


async def return_client(client: AsyncClient) -> None:
    """Give a client back; the last one who does so closes it, and with it what it still has open."""
    jobs = _shared[asyncio.get_running_loop()]
    shared = jobs[client.job]
    shared.users -= 1
    if not shared.users:
        del jobs[client.job]
        await client.close()
