"""What could not be removed when its environment closed: it is tried again until it is gone.

An error in one step of a close must not keep what the later steps remove. So each step is made whatever became of the others, and a step
that fails is left here. One thread makes these again, beside everything else, each time after a longer pause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from workers.cpu.errors import ProcessesLeft, SandboxError

RETRY_S = 5.0
LONGEST_RETRY_S = 300.0
log = logging.getLogger(__name__)


class Leftovers:
    """The removals that have failed; any thread may use it."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        """Try again after `retry_s` seconds, then after twice as many each time."""
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._removals: dict[str, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        self._has_more = False

    def removed(self, what: str, remove: Callable[[], None]) -> bool:
        """Remove `what`; where that fails, say so in the log and have it tried again. Return whether it is gone."""
        try:
            remove()
        except (SandboxError, OSError) as error:
            log.warning("%s could not be removed and is tried again: %s", what, error)
        else:
            return True
        with self._changed:
            self._removals[what] = remove
            self._has_more = True
            self._changed.notify_all()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="tangram-leftovers", daemon=True)
                self._thread.start()
        return False

    def _run(self) -> None:
        pause_s, due = self._retry_s, time.monotonic() + self._retry_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_more, due - time.monotonic())
                if self._closed:
                    return
                if self._has_more:  # what has come since is tried as soon as the first ones were
                    self._has_more = False
                    pause_s, due = self._retry_s, min(due, time.monotonic() + self._retry_s)
            if time.monotonic() >= due:
                pause_s = min(2 * pause_s, LONGEST_RETRY_S) if self._try_all() else self._retry_s
                due = time.monotonic() + pause_s

    def _try_all(self) -> list[str]:
        """Try all removals once more; return why some failed."""
        with self._changed:
            removals = list(self._removals.items())
        problems = []
        for what, remove in removals:
            try:
                remove()
            except (SandboxError, OSError) as error:
                problems.append(f"{what} could not be removed: {error}")
            else:
                log.info("%s is removed now", what)
                with self._changed:
                    self._removals.pop(what, None)
        return problems

    def close(self) -> None:
        """Try for the last time. Raises `ProcessesLeft`, which names what is left."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if problems := self._try_all():
            raise ProcessesLeft("; ".join(problems))
