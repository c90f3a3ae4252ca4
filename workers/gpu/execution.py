"""One action on an engine, within its timeout.

To bring an instance onto its cells is overhead. Only the time in which the engine computes counts against the timeout. If an engine dies,
an idempotent action is tried once more, and both tries share one timeout. A start that is under way is never broken off: an action
that is cancelled during a start ends when the start is over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from app.action_task import Call
from tangram.errors import ActionCancelled, ActionTimedOut
from workers.gpu.call_control import CallControl
from workers.gpu.engines.abstract import Engine
from workers.gpu.errors import CallCancelled, EngineDied
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName

T = TypeVar("T")

log = logging.getLogger(__name__)


class Execution:
    """One action's time on engines, at most `timeout_s` seconds in all; `call.execution_s` has it afterwards."""

    def __init__(self, call: Call, control: CallControl, timeout_s: float) -> None:
        self._call, self._control, self._timeout_s = call, control, timeout_s
        self._spent_s = 0.0

    def answer(self, host: ServiceHost, name: InstanceName, evict: Sequence[InstanceName], ask: Callable[[Engine, CallControl], T]) -> T:
        """Bring the instance onto its cells in place of others, and ask its engine.

        Raises `ActionCancelled`, `ActionTimedOut` and what host and engine raise.
        """
        try:
            with host.serving(*name, [*evict, *host.in_the_way(*name, evict)]) as engine:
                return self._ask(engine, ask)
        except EngineDied as error:
            if not self._call.header.get("idempotent"):
                raise
            # A caller that no longer waits does not justify another start.
            self._check()
            # Once only: an engine that dies twice under the same call may be dying of it.
            log.warning("action %s is run again: %s", self._call.id, error)
            with host.serving(*name) as engine:
                return self._ask(engine, ask)

    def _ask(self, engine: Engine, ask: Callable[[Engine, CallControl], T]) -> T:
        """Ask an engine, for as long as the action still may take."""
        self._check()
        deadline = threading.Timer(self._timeout_s - self._spent_s, self._control.cancelled.set)
        began = time.perf_counter()
        deadline.start()
        try:
            return ask(engine, self._control)
        except CallCancelled:
            raise self._why() from None
        finally:
            deadline.cancel()
            self._spent_s += time.perf_counter() - began
            self._call.execution_s = self._spent_s

    def _check(self) -> None:
        if self._control.cancelled.is_set() or self._spent_s >= self._timeout_s:
            raise self._why()

    def _why(self) -> ActionCancelled | ActionTimedOut:
        if self._call.cancel_reason:
            return ActionCancelled(self._call.cancel_reason, self._call.cancel_cause)
        return ActionTimedOut(f"ran longer than timeout_s = {self._timeout_s:g}", "engine_timeout")
