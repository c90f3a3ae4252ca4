"""Handles: what a trainer holds of an action that it has submitted.

A handle is a promise of one result. The sync handle can also be awaited, so one kind of handle passes between threads and
coroutines; the async handle has the same words, every one awaited.

Cancelling has two directions. `cancel()` asks the stack to end the action; how it ended is then its result, mostly
`ActionCancelled`, sometimes the value that came first. Cancelling a coroutine that awaits a handle (also by
`asyncio.timeout` or `wait_for`) cancels the action; `result(timeout_s=…)` running out does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from tangram.errors import ResultNotReady

T = TypeVar("T")


class Handle(Generic[T]):
    """One submitted action. `id` is the id of its Celery task."""

    __slots__ = ("_cancel", "future", "id")

    def __init__(self, task_id: str, future: Future[T], cancel: Callable[[str], None]) -> None:
        """Stand for the task `task_id`, whose end resolves `future`; `cancel` asks for its end."""
        self.id = task_id
        self.future = future
        self._cancel = cancel

    def __repr__(self) -> str:
        """Show the id and whether there is a result."""
        return f"<{type(self).__name__} {self.id} {'done' if self.done() else 'waiting'}>"

    def done(self) -> bool:
        """Return whether the action has ended."""
        return self.future.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result, at most `timeout_s` seconds.

        Raises
        ------
        ResultNotReady
            When the time is over; the action goes on and `result` may be called again.
        ActionError
            The way in which the action ended, if not with a result.
        StackUnreachable
            When the action could not be sent, or the result store was away for too long.

        """
        try:
            return self.future.result(timeout_s)
        except TimeoutError:
            # Some errors of actions are timeouts too: only a future without result has run out of time.
            if self.future.done():
                return self.future.result()
            raise ResultNotReady(f"action {self.id} has no result after {timeout_s:g} s") from None

    def cancel(self) -> None:
        """Ask the stack to end the action; does not wait. Where that cannot be sent, the result is `StackUnreachable`."""
        if not self.future.done():
            self._cancel(self.id)

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
        """Wrap the sync handle."""
        self._handle = handle
        self.id = handle.id

    def __repr__(self) -> str:
        """Show the id and whether there is a result."""
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

    def __await__(self) -> Generator[Any, None, T]:
        """Wait for the result; cancelling the coroutine cancels the action."""
        return self._handle.__await__()
