"""The sync client: what a trainer's threads call.

Thin words over `tangram.calls` (what is asked) and `tangram.session` (how it travels); nothing is decided here. A client
and its environments may be used by many threads at once. `tangram.aio` has the same words for coroutines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import wait
from types import TracebackType
from typing import Any, Self, Unpack

from tangram import calls
from tangram.action import Action
from tangram.arguments import AnyPath, takes
from tangram.calls import CallOptions, Conversation, ExecOptions, Limits, OpenOptions, Place, ServiceOptions
from tangram.errors import TangramError
from tangram.files import Files
from tangram.following import OnText, follow
from tangram.handles import Handle
from tangram.requests import Headers
from tangram.results import Chunk, ExecResult, HttpAnswer, Logprobs, Response, Scores, Snapshot, Texts
from tangram.session import CLOSE_WAIT_S, OpenEnvironment, Session
from tangram.settings import Settings

_log = logging.getLogger(__name__)


class Client:
    """A trainer's way to the stack.

    All methods that wait raise the `ActionError` that says how an action ended without a result, `InvalidAction` for
    wrong words before anything is sent, and `StackUnreachable` when the stack is away. Leaving the context closes the
    environments that were opened through this client.
    """

    def __init__(self, job: str = "default", settings: Settings | None = None) -> None:
        """Connect as `job`, to the stack that `settings` name: by default `TANGRAM_*`, else the state folder's stack.

        Raises `StackUnreachable` when no stack answers within `settings.connect_timeout_s`.
        """
        self._session = Session(job, settings)
        wait(self._session.start(), self._session.start_limit_s)
        self._session.check_started()

    @property
    def job(self) -> str:
        """The job that this client's actions belong to."""
        return self._session.job

    @takes(OpenOptions)
    def open(self, **options: Unpack[OpenOptions]) -> Environment:
        """Open an environment of a trajectory and wait until it is there."""
        action = self._session.loads.place(calls.open_environment(self.job, **options))
        self._session.open_environment(action).result()
        return Environment(self._session, calls.place_of(action))

    def environment(self, environment: str, *, trajectory: str = "") -> Environment:
        """Return an environment of this job by its id, whoever has opened it: another client, or the gateway. Makes no call.

        Its actions count as the trajectory's, by default one of the same name.
        """
        return Environment(self._session, Place(self.job, trajectory or environment, environment))

    @takes(ServiceOptions)
    def score(self, service: str, items: Sequence[Any], **options: Unpack[ServiceOptions]) -> Scores:
        """Return the scores that a reward model gives to `items`, one each."""
        scores: Scores = self._run(calls.score(self.job, service, items, options))
        return scores

    @takes(ServiceOptions)
    def logprobs(
        self, service: str, token_ids: Iterable[Iterable[int]], *, top_k: int | None = None, **options: Unpack[ServiceOptions]
    ) -> Logprobs:
        """Return a teacher's log-probabilities: for each sequence of n token ids n-1 floats.

        A sequence may be a list, an `array.array`, a numpy array or a row of one. With `top_k`, 0 to 128, the result also has the rank of
        each id, and the `top_k` most likely ids of each position. Where arrays of numpy went in, such come back.
        """
        logprobs: Logprobs = self._run(calls.logprobs(self.job, service, token_ids, options, top_k=top_k))
        return logprobs.like(token_ids)

    @takes(ServiceOptions)
    def generate(
        self,
        service: str,
        prompts: Sequence[str | Conversation],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        **options: Unpack[ServiceOptions],
    ) -> Texts:
        """Return how a model continues `prompts`, one text each; what is not given is the service's own default.

        A prompt is plain text, or a conversation that the model's chat template writes out.
        """
        texts: Texts = self._run(calls.generate(self.job, service, prompts, max_tokens, temperature, seed, options))
        return texts

    @takes(CallOptions)
    def call(self, quota: str, **options: Unpack[CallOptions]) -> Response:
        """Send one request to an outside API once its quota allows it, and return the answer, whatever its status code."""
        answer: Response = self._run(calls.call(self.job, quota, **options))
        return answer

    def submit(self, action: Action) -> Handle[Any]:
        """Submit any action and return a handle on it; does not wait. One without a job gets this client's."""
        return self._session.submit(action)

    def output(self, task_id: str, after: str = "0") -> Iterator[Chunk]:
        """Yield what a command prints that any process has submitted, given the id of its task; see `Handle.output`.

        One that is not known, or not yet, is waited for.
        """
        return self._session.streams.read(task_id, after)

    def cancel(self, *, trajectory: str | None = None, job: str | None = None) -> None:
        """Cancel every waiting and running action of a trajectory of this job, or of a whole job, and its environments.

        Returns once the broker knows; raises `StackUnreachable` where it cannot be reached.
        """
        self._session.wait_for(self._session.cancel(trajectory, job))

    def close(self) -> None:
        """Close this client's environments, waiting a bounded time for that, and its connections. Idempotent."""
        try:
            wait(self._session.begin_closing(), CLOSE_WAIT_S)
        finally:
            self._session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, action: Action) -> Any:
        return self._session.submit(action).result()


class Environment(OpenEnvironment):
    """A stateful sandbox: files, processes and shell sessions stay between its actions."""

    @takes(ExecOptions)
    def exec(
        self, command: str, *, on_stdout: OnText | None = None, on_stderr: OnText | None = None, **options: Unpack[ExecOptions]
    ) -> ExecResult:
        """Run a shell command and wait for it. `on_stdout` and `on_stderr` get what it prints as text, as it comes, in this thread.

        A command that fails is a result with its exit code. One that was killed at a timeout is a result with status
        `timed_out` and what it had printed. Everything else that can happen to an action is raised.
        """
        if on_stdout is None and on_stderr is None:
            return self.submit(command, **options).result()
        options["stream"] = True
        return follow(self.submit(command, **options), on_stdout, on_stderr)

    @takes(ExecOptions)
    def submit(self, command: str, **options: Unpack[ExecOptions]) -> Handle[ExecResult]:
        """Submit a shell command and return a handle on it; does not wait."""
        return self._session.submit(calls.execute(self._place, command, **options))

    @property
    def files(self) -> Files:
        """Its files: reading and writing several at once, listing, moving, and folders from and to this machine."""
        return Files(self._session, self._place)

    def read_file(self, path: AnyPath) -> bytes:
        """Return the bytes of a file."""
        data: bytes = self._session.submit(calls.read_file(self._place, path)).result()
        return data

    def write_file(self, path: AnyPath, data: bytes | str, mode: int | None = None) -> None:
        """Write a file, its parent folders too; text as UTF-8, `mode` are permission bits."""
        self._session.submit(calls.write_file(self._place, path, data, mode)).result()

    @takes(Limits)
    def request(
        self,
        port: int,
        path: str = "/",
        method: str = "GET",
        headers: Headers | None = None,
        body: bytes | str | None = None,
        **limits: Unpack[Limits],
    ) -> HttpAnswer:
        """Have a server that runs in the environment answer an HTTP request, and return the answer, whatever its status.

        The server listens on 127.0.0.1 or on all addresses there. What commands left running has the core of the request meanwhile.
        Raises `ActionFailed` with the cause `no_answer` where nothing listens, or what answers does not speak HTTP, and `ActionTimedOut`
        where the answer does not end within `timeout_s`.
        """
        action = calls.request(self._place, port, path, method=method, headers=headers, body=body, **limits)
        answer: HttpAnswer = self._session.submit(action).result()
        return answer

    def snapshot(self) -> Snapshot:
        """Keep the files as they are now, so that other environments can be opened from them: one prepared state for a group.

        Running commands go on meanwhile. Raises `ActionFailed` where the node's environments are not containers.
        """
        snapshot: Snapshot = self._session.submit(calls.snapshot(self._place)).result()
        return snapshot

    def close_session(self, session: str) -> None:
        """End the processes of a shell session once what was submitted to it has ended, and forget its state; files stay.

        A session of that name can be used again, and begins afresh. Nothing happens where there is none.
        """
        self._session.submit(calls.close_session(self._place, session)).result()

    def close(self) -> None:
        """End its processes and throw its files away. Idempotent; nothing is left to do after a cancel, or the end of the lease."""
        if not self._closed:
            self._closed = True
            with self._unless_closed_anyway():
                self._session.submit(calls.close_environment(self._place)).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close. What goes wrong then is only logged, since it changes nothing of what was done before."""
        try:
            self.close()
        except TangramError as problem:
            _log.warning("environment %s, as its block was left: %s", self.id, problem)
