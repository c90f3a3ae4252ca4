"""The life cycle of an engine. This object alone applies the table of a service's states, `scheduler/model/lifecycle.py`.

Two rules. Changes of state happen one at a time (`changing`). Calls are let in only while the engine is resident (`working`) and are
counted; a change that takes the weights away refuses further calls and waits until the count is zero.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.model.lifecycle import SERVICE, ServiceState
from workers.gpu.call_control import CallControl
from workers.gpu.errors import EngineBusy, EngineDied, EngineFailed, NotResident, WrongAnswer, WrongState, one_line

_LOOK_FOR_CANCEL_S = 0.1


class Lifecycle:
    """The state of one engine and the number of calls in it. Safe for many threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._state: ServiceState = "absent"
        self._failure = ""
        self._running = 0
        self._one_change = threading.Lock()
        self._changed = threading.Condition()

    @property
    def state(self) -> ServiceState:
        """The state now."""
        return self._state

    @property
    def failure(self) -> str:
        """Why the engine is `failed`; empty in every other state."""
        return self._failure

    @property
    def running(self) -> int:
        """How many calls are in the engine now."""
        return self._running

    @contextmanager
    def working(self, limit: int, control: CallControl) -> Iterator[None]:
        """Let one call in, once fewer than `limit` run.

        Raises `NotResident` unless the engine is and stays resident, `EngineDied` where it has failed (or is being
        started again), `CallCancelled` if cancelled while waiting.
        """
        with self._changed:
            while True:
                control.check()
                if self._state != "resident":
                    because = f" ({self._failure})" if self._failure else ""
                    kind = EngineDied if self._state in ("failed", "starting") else NotResident
                    raise kind(f"{self._name} is {self._state}, not resident{because}")
                if self._running < limit:
                    break
                self._changed.wait(_LOOK_FOR_CANCEL_S)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def broke(self, reason: str) -> bool:
        """Be failed at once, out of `resident` or `host`; say whether it was in one of them."""
        with self._changed:
            if self._state not in ("resident", "host"):
                return False
            self._settle("failed", reason)
            return True

    @contextmanager
    def changing(self, via: ServiceState, to: ServiceState, drain_s: float = 0.0) -> Iterator[None]:
        """Go to the state `via`, do the block's work once no call runs, and end in `to`.

        Raises `WrongState` where the table has no such way, `EngineBusy` after `drain_s` seconds of running calls
        (then the engine stays resident, or failed), `EngineFailed` if the block failed (then the engine is `failed`), `WrongAnswer` if the
        block did.
        """
        with self._one_change, self._step(via, to, drain_s):
            yield

    @contextmanager
    def stopping(self, drain_s: float) -> Iterator[None]:
        """End in `absent` from whatever settled state there is. Raises as `changing` does."""
        with self._one_change:
            if self._state == "resident":
                with self._step("evicting", "absent", drain_s):
                    yield
            else:
                try:
                    yield
                except Exception as error:
                    reason = one_line(error)
                    if "failed" in SERVICE.after(self._state):
                        self._settle("failed", reason)
                    raise EngineFailed(f"{self._name}: stopping failed: {reason}") from error
                if self._state != "absent":
                    self._settle("absent")

    @contextmanager
    def _step(self, via: ServiceState, to: ServiceState, drain_s: float) -> Iterator[None]:
        """Do one change; the caller holds `_one_change`."""
        self._enter(via)
        if not self._drained(drain_s):
            busy = f"calls were still running after {drain_s:g} s"
            self._settle("resident" if via == "evicting" else "failed", "" if via == "evicting" else busy)
            raise EngineBusy(f"{self._name}: {busy}")
        try:
            yield
        except Exception as error:
            reason = one_line(error)
            self._settle("failed", reason)
            kind = WrongAnswer if isinstance(error, WrongAnswer) else EngineFailed
            raise kind(f"{self._name}: {via} failed: {reason}") from error
        except BaseException as error:
            self._settle("failed", one_line(error))
            raise
        self._settle(to)

    def _enter(self, via: ServiceState) -> None:
        with self._changed:
            if via not in SERVICE.after(self._state):
                raise WrongState(f"{self._name} is {self._state}: it cannot go on to {via}")
            self._state = via
            self._failure = ""
            self._changed.notify_all()

    def _drained(self, drain_s: float) -> bool:
        """Wait until no call runs; False if the time was not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, drain_s)

    def _settle(self, state: ServiceState, failure: str = "") -> None:
        with self._changed:
            if state not in SERVICE.after(self._state):
                raise WrongState(f"{self._name} is {self._state}: it cannot end in {state}")
            self._state = state
            self._failure = failure
            self._changed.notify_all()
