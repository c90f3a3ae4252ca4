"""Looks at the memory of all environments of a node that are held to an allowance: one thread, for each as often as it could matter."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.cpu.memory.allowance import Allowance

log = logging.getLogger(__name__)

AFTER_ERROR_S = 1.0
STEPS_S = 0.32, 0.04, 0.02
"""Looks fall on multiples of one of these, so that many environments are looked at in one go."""


class Watcher:
    """Looks at allowances. `on_wanted` gets the report of an environment that has just been paused; it must not block."""

    def __init__(self) -> None:
        self.on_wanted: Callable[[dict[str, Any]], None] = lambda report: None
        self._changed = threading.Condition()
        self._due: dict[Allowance, float] = {}
        """When to look at each."""
        self._wakes_at = math.inf
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tangram-memory", daemon=True)
        self._thread.start()

    def watch(self, allowance: Allowance) -> None:
        """Look at an environment from now on."""
        with self._changed:
            self._due[allowance] = 0.0
            self._changed.notify()

    def forget(self, allowance: Allowance) -> None:
        """Look at an environment no more."""
        with self._changed:
            self._due.pop(allowance, None)

    def look_within(self, allowance: Allowance, patience_s: float) -> None:
        """Look at an environment after so many seconds, or earlier, in the thread, if it is watched. 0 s mean at once."""
        at = _latest(time.monotonic() + patience_s, patience_s) if patience_s else 0.0
        with self._changed:
            if at < self._due.get(allowance, 0.0):
                self._due[allowance] = at
                if at < self._wakes_at:
                    self._changed.notify()

    def wanted(self) -> list[dict[str, Any]]:
        """Return the reports of all environments that are paused."""
        with self._changed:
            watched = list(self._due)
        return [report for report in (allowance.wanted() for allowance in watched) if report is not None]

    def _run(self) -> None:
        while (due := self._await_due()) is not None:
            looked_at = [(allowance, self._look(allowance)) for allowance in due]
            with self._changed:
                now = time.monotonic()
                for allowance, patience_s in looked_at:
                    # Where it is to be looked at soon, it has changed meanwhile.
                    if self._due.get(allowance) == math.inf:
                        self._due[allowance] = _latest(now + patience_s, patience_s)

    def _await_due(self) -> list[Allowance] | None:
        """Wait until some are due, and return them; None once the watcher is closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if due := [allowance for allowance, at in self._due.items() if at <= now]:
                    self._due.update(dict.fromkeys(due, math.inf))
                    return due
                self._wakes_at = min(self._due.values(), default=math.inf)
                self._changed.wait(self._wakes_at - now if self._due else None)
        return None

    def _look(self, allowance: Allowance) -> float:
        try:
            return allowance.look()
        except Exception:
            # Whatever is wrong with one environment, the others are to be watched.
            log.exception("the memory of environment %s could not be looked at", allowance.environment)
            return AFTER_ERROR_S

    def close(self) -> None:
        """Stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()


def _latest(at: float, patience_s: float) -> float:
    """Return the last multiple of a step up to `at`, the step being no longer than the patience."""
    step_s = next((step for step in STEPS_S if step <= patience_s), STEPS_S[-1])
    return at // step_s * step_s
