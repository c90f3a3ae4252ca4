"""Handles: what a trainer holds of an action that it has submitted.

A handle is a promise of one result. The sync handle can also be awaited, so one kind of handle passes between threads and
coroutines; the async handle has the same words, every one awaited.

Cancelling has two directions. `cancel()` asks the stack to end the action; how it ended is then its result, mostly
`ActionCancelled`, sometimes the value that came first. Cancelling a coroutine that awaits a handle (also by
`asyncio.timeout` or `wait_for`) cancels the action; `result(timeout_s=…)` running out does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from tangram import input_messages
from tangram.errors import InvalidAction, ResultNotReady
from tangram.input_messages import What
from tangram.results import Chunk

if TYPE_CHECKING:
    from tangram.action import Action
    from tangram.publisher import ControlRequest
    from tangram.session import Session

T = TypeVar("T")

_COMMAND: Final = {"cpu.exec": ""}
_STREAM: Final = {"stream": "stream=True"}
_PTY: Final = {"terminal": "pty=(rows, columns)"}
_INPUT: Final = {"stdin": "stdin=True"} | _PTY
"""What a command must have been submitted with, by the argument of the action, or by its kind."""


class Handle(Generic[T]):
    """One submitted action. `id` is the id of its Celery task."""

    __slots__ = ("_has", "id", "remote", "future")  # noqa: RUF023  (the session says why none is pickled)

    def __init__(self, task_id: str, future: Future[T], remote: Session, action: Action) -> None:
        """Stand for the task `task_id`, whose end resolves `future`; all else is asked of `remote`, which has submitted it as `action`."""
        self.id = task_id
        self.future = future
        self.remote = remote
        # Its kind and the names of its arguments, not the action itself, which may be large.
        self._has = {action.kind, *(name for name in (*_STREAM, *_INPUT) if action.arguments.get(name))}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {'done' if self.done() else 'waiting'}>"

    def done(self) -> bool:
        """Return whether the action has ended."""
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result, at most `timeout_s` seconds.

        Raises the `ActionError` that says how the action ended, if not with a result; `ResultNotReady` when the time is over: the action
        goes on, and `result` may be called again; `StackUnreachable` when the action could not be sent: it is not done; `Unknown` when
        broker or result store were away for too long after it had perhaps been sent.
        """
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            # Some errors of actions are timeouts too: only a future without result has run out of time.
            if self.future.done():
                return self.future.result()
            raise ResultNotReady(f"action {self.id} has no result after {timeout_s:g} s") from None

    def cancel(self) -> None:
        """Ask the stack to end the action; does not wait. Where that cannot be sent, the result is `Unknown`."""
        if not self.future.done():
            self.remote.cancel_task(self.id)

    def output(self, after: str = "0") -> Iterator[Chunk]:
        """Yield what a command with `stream` prints, as it comes; end when it has ended.

        Each reader gets everything, from behind the chunk with the id `after`, however late it comes. The result store keeps the last
        MiB of a command, for an hour after it has ended; `Chunk.dropped` says what a reader has missed.

        Raises after the last chunk the `ActionError` that says how the action ended, if not with a result; `InvalidAction` when `after` is
        no id of a chunk, and at once where the action has no `stream`; `StackUnreachable` when the result store was away for too long.
        """
        self._needs(_STREAM)
        return self.remote.streams.read(self.id, after, self.future)

    def send_input(self, data: bytes) -> None:
        """Give a command with `stdin` or `pty` input, at most 64 KiB; return once the broker has it.

        Input comes in the order of the calls, and what is sent while the action still waits is kept until it runs. It is dropped where
        the action has ended. A command that leaves more than 4 MiB of input unread ends as `failed`. Where a scheduler or a broker dies
        with input on its way, that input is lost, and nothing that this process gives the command after it arrives. Raises `InvalidAction`
        when `data` is empty or larger, or the action has neither `stdin` nor `pty`; `StackUnreachable` when the broker cannot be reached.
        """
        self._give(input_messages.data(data), _INPUT)

    def close_input(self) -> None:
        """End the input of a command with `stdin`; at a terminal, type Ctrl-D. Otherwise as `send_input`."""
        self._give(input_messages.end(), _INPUT)

    def signal(self, number: int) -> None:
        """Send a signal to the processes that a command has started, in order with its input. Otherwise as `send_input`.

        The shell that runs the command line gets it only where it handles it (`trap`; SIGINT in bash), where no program is running, and for
        SIGKILL. So after SIGTERM the line goes on behind the program that has ended. At a terminal, SIGINT is typed as Ctrl-C.
        `InvalidAction` is raised where the action is no command.
        """
        self._give(input_messages.signal_of(number), _COMMAND)

    def resize_pty(self, rows: int, columns: int) -> None:
        """Give the terminal of a command with `pty` another size. Otherwise as `send_input`."""
        self._give(input_messages.size(rows, columns), _PTY)

    def _give(self, what: What, needed: Mapping[str, str]) -> None:
        self.remote.wait_for(self._request(what, needed))

    def _request(self, what: What, needed: Mapping[str, str]) -> ControlRequest:
        self._needs(needed)
        return self.remote.give(self.id, what)

    def _needs(self, options: Mapping[str, str]) -> None:
        if self._has.isdisjoint(options):
            words = " or ".join(options.values())
            command = f"a command{words and ' with '}{words}"
            raise InvalidAction(words.partition("=")[0] or "command", f"action {self.id} has none: submit {command}")

    def when_done(self, call: Callable[[bool], None]) -> None:
        """Call `call(failed)` once the action has ended, from the thread that brings the result; it must be quick."""
        self.future.add_done_callback(lambda future: call(future.exception() is not None))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result in a coroutine; cancelling the coroutine cancels the action."""
        return self._wait(None).__await__()

    async def _wait(self, timeout_s: float | None) -> T:
        future = asyncio.wrap_future(self.future)
        try:
            if timeout_s is not None:
                await asyncio.wait([future], timeout=timeout_s)
                if not future.done():
                    raise ResultNotReady(f"action {self.id} has no result after {timeout_s:g} s")
            return await future
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            # Nobody looks at this wrapper again; the action's own future is not touched by it.
            future.cancel()


class AsyncHandle(Generic[T]):
    """One submitted action, for coroutines. `id` is the id of its Celery task."""

    __slots__ = ("_handle", "id")

    def __init__(self, handle: Handle[T]) -> None:
        self._handle = handle
        self.id = handle.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {'done' if self.done() else 'waiting'}>"

    def done(self) -> bool:
        """Return whether the action has ended."""
        return self._handle.done()

    async def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result, at most `timeout_s` seconds; raises as `Handle.result` does."""
        return await self._handle._wait(timeout_s)

    async def cancel(self) -> None:
        """Ask the stack to end the action; does not wait for that."""
        self._handle.cancel()

    def output(self, after: str = "0") -> AsyncIterator[Chunk]:
        """Yield what a command with `stream` prints, as it comes; see `Handle.output`."""
        self._handle._needs(_STREAM)
        return self._handle.remote.streams.read_async(self.id, after, self._handle.future)

    async def send_input(self, data: bytes) -> None:
        """Give a command with `stdin` or `pty` input; see `Handle.send_input`."""
        await self._give(input_messages.data(data), _INPUT)

    async def close_input(self) -> None:
        """End the input of a command with `stdin`; see `Handle.close_input`."""
        await self._give(input_messages.end(), _INPUT)

    async def signal(self, number: int) -> None:
        """Send a signal to the processes that a command has started; see `Handle.signal`."""
        await self._give(input_messages.signal_of(number), _COMMAND)

    async def resize_pty(self, rows: int, columns: int) -> None:
        """Give the terminal of a command with `pty` another size; see `Handle.resize_pty`."""
        await self._give(input_messages.size(rows, columns), _PTY)

    async def _give(self, what: What, needed: Mapping[str, str]) -> None:
        await asyncio.wrap_future(self._handle._request(what, needed).sent)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result; cancelling the coroutine cancels the action."""
        return self._handle.__await__()
