"""The async client: the words of `tangram.client`, every call awaited.

Thousands of coroutines share one client: sending is done by one thread, results come over one subscription, and nothing
here blocks the event loop. Cancelling a coroutine that waits for an action cancels the action.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, Unpack

from tangram import calls
from tangram.action import Action
from tangram.arguments import AnyPath, takes
from tangram.calls import CallOptions, Conversation, ExecOptions, Limits, OpenOptions, Place, ServiceOptions
from tangram.errors import TangramError
from tangram.files import AsyncFiles
from tangram.following import OnText, follow_async
from tangram.handles import AsyncHandle
from tangram.requests import Headers
from tangram.results import Chunk, ExecResult, HttpAnswer, Logprobs, Response, Scores, Snapshot, Texts
from tangram.session import CLOSE_WAIT_S, OpenEnvironment, Session
from tangram.settings import Settings

_log = logging.getLogger(__name__)


class AsyncClient:
    """A trainer's way to the stack, for coroutines. Errors and meanings are those of `tangram.client.Client`."""

    def __init__(self, job: str = "default", settings: Settings | None = None) -> None:
        """Prepare; entering the context connects, else the first call does."""
        self.job = job
        self._settings = settings
        self._session: Session | None = None
        self._starting = asyncio.Lock()

    @takes(OpenOptions)
    async def open(self, **options: Unpack[OpenOptions]) -> AsyncEnvironment:
        """Open an environment of a trajectory; see `Client.open`."""
        action = calls.open_environment(self.job, **options)
        session = await self._connected()
        action = session.loads.place(action)
        await session.open_environment(action)
        return AsyncEnvironment(session, calls.place_of(action))

    async def environment(self, environment: str, *, trajectory: str = "") -> AsyncEnvironment:
        """Return an environment of this job by its id; see `Client.environment`."""
        return AsyncEnvironment(await self._connected(), Place(self.job, trajectory or environment, environment))

    @takes(ServiceOptions)
    async def score(self, service: str, items: Sequence[Any], **options: Unpack[ServiceOptions]) -> Scores:
        """Return the scores that a reward model gives to `items`, one each."""
        scores: Scores = await self._run(calls.score(self.job, service, items, options))
        return scores

    @takes(ServiceOptions)
    async def logprobs(
        self, service: str, token_ids: Iterable[Iterable[int]], *, top_k: int | None = None, **options: Unpack[ServiceOptions]
    ) -> Logprobs:
        """Return a teacher's log-probabilities: for each sequence of n token ids n-1 floats; see `Client.logprobs`."""
        logprobs: Logprobs = await self._run(calls.logprobs(self.job, service, token_ids, options, top_k=top_k))
        return logprobs.like(token_ids)

    @takes(ServiceOptions)
    async def generate(
        self,
        service: str,
        prompts: Sequence[str | Conversation],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        **options: Unpack[ServiceOptions],
    ) -> Texts:
        """Return how a model continues `prompts`, one text each; see `Client.generate`."""
        texts: Texts = await self._run(calls.generate(self.job, service, prompts, max_tokens, temperature, seed, options))
        return texts

    @takes(CallOptions)
    async def call(self, quota: str, **options: Unpack[CallOptions]) -> Response:
        """Send one request to an outside API once its quota allows it, and return the answer, whatever its status code."""
        answer: Response = await self._run(calls.call(self.job, quota, **options))
        return answer

    async def submit(self, action: Action) -> AsyncHandle[Any]:
        """Submit any action and return a handle on it; see `Client.submit`."""
        return AsyncHandle((await self._connected()).submit(action))

    async def output(self, task_id: str, after: str = "0") -> AsyncIterator[Chunk]:
        """Yield what a command prints that any process has submitted, given the id of its task; see `Handle.output`."""
        async for chunk in (await self._connected()).streams.read_async(task_id, after):
            yield chunk

    async def cancel(self, *, trajectory: str | None = None, job: str | None = None) -> None:
        """Cancel a trajectory of this job, or a whole job; see `Client.cancel`."""
        await asyncio.wrap_future((await self._connected()).cancel(trajectory, job).sent)

    async def close(self) -> None:
        """Close this client's environments, waiting a bounded time for that, and its connections. Idempotent."""
        async with self._starting:
            session = self._session
            if session is None:
                return
            try:
                await settled(session.begin_closing(), CLOSE_WAIT_S)
            finally:
                await asyncio.shield(asyncio.to_thread(session.stop))

    async def __aenter__(self) -> Self:
        """Connect. Raises `StackUnreachable` when no stack answers in time."""
        await self._connected()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _connected(self) -> Session:
        if self._session is None:
            async with self._starting:
                if self._session is None:
                    self._session = await open_session(self.job, self._settings)
        return self._session

    async def _run(self, action: Action) -> Any:
        return await (await self._connected()).submit(action)


class AsyncEnvironment(OpenEnvironment):
    """A stateful sandbox, for coroutines; see `tangram.client.Environment`."""

    @takes(ExecOptions)
    async def exec(
        self, command: str, *, on_stdout: OnText | None = None, on_stderr: OnText | None = None, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a shell command and wait for it; see `Environment.exec`. Callbacks may be coroutine functions."""
        if on_stdout is None and on_stderr is None:
            return await (await self.submit(command, **options))
        options["stream"] = True
        return await follow_async(await self.submit(command, **options), on_stdout, on_stderr)

    @takes(ExecOptions)
    async def submit(self, command: str, **options: Unpack[ExecOptions]) -> AsyncHandle[ExecResult]:
        """Submit a shell command and return a handle on it."""
        return AsyncHandle(self._session.submit(calls.execute(self._place, command, **options)))

    @property
    def files(self) -> AsyncFiles:
        """Its files; see `Environment.files`."""
        return AsyncFiles(self._session, self._place)

    async def read_file(self, path: AnyPath) -> bytes:
        """Return the bytes of a file."""
        data: bytes = await self._session.submit(calls.read_file(self._place, path))
        return data

    async def write_file(self, path: AnyPath, data: bytes | str, mode: int | None = None) -> None:
        """Write a file, its parent folders too; text as UTF-8, `mode` are permission bits."""
        await self._session.submit(calls.write_file(self._place, path, data, mode))

    @takes(Limits)
    async def request(
        self,
        port: int,
        path: str = "/",
        method: str = "GET",
        headers: Headers | None = None,
        body: bytes | str | None = None,
        **limits: Unpack[Limits],
    ) -> HttpAnswer:
        """Have a server that runs in the environment answer a request; see `Environment.request`."""
        action = calls.request(self._place, port, path, method=method, headers=headers, body=body, **limits)
        answer: HttpAnswer = await self._session.submit(action)
        return answer

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now; see `Environment.snapshot`."""
        snapshot: Snapshot = await self._session.submit(calls.snapshot(self._place))
        return snapshot

    async def close_session(self, session: str) -> None:
        """End the processes of a shell session; see `Environment.close_session`."""
        await self._session.submit(calls.close_session(self._place, session))

    async def close(self) -> None:
        """End its processes and throw its files away; see `Environment.close`."""
        if not self._closed:
            self._closed = True
            with self._unless_closed_anyway():
                await self._session.submit(calls.close_environment(self._place))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close; see `Environment.__exit__`."""
        try:
            await self.close()
        except TangramError as problem:
            _log.warning("environment %s, as its block was left: %s", self.id, problem)


async def open_session(job: str, settings: Settings | None = None, *, client_id: str | None = None) -> Session:
    """Return a session that is connected. Raises `StackUnreachable` when no stack answers in time."""
    session = await asyncio.to_thread(Session, job, settings, client_id=client_id)
    try:
        await settled(session.start(), session.start_limit_s)
        session.check_started()
    except BaseException:
        session.stop(0.0)
        raise
    return session


async def settled(futures: Iterable[Future[Any]], timeout_s: float) -> None:
    """Wait until all futures are done, however they end, at most `timeout_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(asyncio.wrap_future(future) for future in futures), return_exceptions=True)
