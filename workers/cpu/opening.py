"""An open of an environment that is under way, and how it ends early: by a cancel, at its timeout, or with its sandbox.

| state    | meaning                              | next                                                              |
|----------|--------------------------------------|-------------------------------------------------------------------|
| pending  | the work goes on                     | the work is done: complete; `end`, or the time is over: ended     |
| ended    | the work is being taken back         |                                                                   |
| complete | the environment is the caller's      |                                                                   |

A request to a container engine cannot be interrupted. `Opening.run` therefore does the work in a thread of its own, which checks
between two steps whether it is to go on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from tangram import clock
from tangram.errors import ActionCancelled, ActionTimedOut, TangramError

T = TypeVar("T")
log = logging.getLogger(__name__)

TAKE_BACK_S = 5.0
"""How long the caller of an open that ended waits until all is taken back. An engine that does not answer can take longer."""


class Opening:
    """One open, which ends after `timeout_s` seconds, or never by itself. Any thread may end it.

    `phase` says what it is doing, for the reason of a timeout.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        # Fails with the reason when the open ends early, and is cancelled when the open is complete.
        self._ended: Future[None] = Future()
        self.phase = ""

    def cancel(self, reason: str, cause: str = "cancelled") -> None:
        """End it as cancelled."""
        self.end(ActionCancelled(reason, cause))

    def end(self, error: TangramError) -> None:
        """Have it end early with `error`; nothing where it is complete or has ended."""
        with contextlib.suppress(InvalidStateError):
            self._ended.set_exception(error)

    @property
    def has_ended(self) -> bool:
        """Whether it has ended early."""
        return self._ended.done() and not self._ended.cancelled()

    def check(self) -> None:
        """Raise the error with which it has ended early; return where it goes on."""
        if self.has_ended:
            self._ended.result()

    def wait(self, future: Future[T]) -> T:
        """Return the result of `future`. Raises the reason where the open ends first."""
        clock.wait((future, self._ended))
        self.check()
        return future.result()

    def run(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Return the result of `work`, or raise once the open has ended early and what `work` had begun is gone.

        `work` calls `check` and `wait` often, and takes back what it has begun where these raise. `undo` takes back the result of work that
        was done just when the open ended.
        """
        result: Future[T] = Future()
        clock.thread(lambda: self._work(work, undo, result), "tangram-open").start()
        if not clock.wait((result, self._ended), self._timeout_s):
            during = f": it was {self.phase}" if self.phase else ""
            self.end(ActionTimedOut(f"the environment was not open after {self._timeout_s:g} s{during}", "open_timeout"))
        if self.has_ended and not clock.wait((result,), TAKE_BACK_S):
            log.warning("an open that has ended is taken back late: it is still %s", self.phase or "at work")
            self.check()
        return result.result()

    def _work(self, work: Callable[[], T], undo: Callable[[T], object], result: Future[T]) -> None:
        try:
            value = work()
        except BaseException as error:
            result.set_exception(error if self._ended.cancel() else self._ended.exception())
            return
        if self._ended.cancel():
            result.set_result(value)
            return
        try:
            undo(value)
        except Exception:
            log.exception("an open that has ended could not be taken back")
        result.set_exception(self._ended.exception())
