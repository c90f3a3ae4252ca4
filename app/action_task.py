"""The base class of every action's Celery task: claim, run, report.

| step | what happens |
|---|---|
| claim | the try of the action is claimed in the result store; a message that comes twice is dropped |
| run | the task's body, with its grant at `self.grant` |
| result | Celery stores it: a payload for the tasks of this system, the plain value for all others |
| report | the scheduler is told that the action has ended and its grant is free; with the result, where the broker is the result store |

The worker's side of this, the node, is behind the protocol `NodeRuntime`. The worker provides it in `app/runtime.py`.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from celery import Task
from celery.exceptions import Ignore

from app.runtime import runtime
from tangram import clock
from tangram.errors import ActionError, ActionFailed
from tangram.wire import ACTION_HEADER, EVENTS_QUEUE, GRANT_HEADER, Payload, WireGrant

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Call:
    """One try of an action on this node.

    A task's body fills in what it knows better than a stopwatch round it: `execution_s` without preparation, and without the
    `background_s` seconds for which it wanted a core in the background and had none; `slept_s`, for which it slept there by its own will,
    a part of `execution_s`; `cpu_s` core-seconds used; and `status` with `reason` and `cause` (`tangram/ends.py`) where the action ended
    otherwise than by a return. `answer` is what an outside API said, for the scheduler; with
    `waits_again` it refused, and no result is stored. A call whose result does not count is `refused`. `grant` is what it holds now, as of
    the scheduler's message `stamp`, (epoch, serial). `memory_mb` and `resident_mb` are what its environment held while it ran, at most, and
    holds after the last of its actions; None where that was not measured. `allowed` is the age of the allowance at that end. `excerpt` is
    what the journal is to keep of a command.
    """

    id: str
    grant: WireGrant
    header: dict[str, Any]
    started_at: float
    began: float
    events_queue: str = EVENTS_QUEUE
    """The queue that the scheduler of its node reads."""
    status: str = "succeeded"
    reason: str = ""
    cause: str = ""
    execution_s: float | None = None
    background_s: float = 0.0
    slept_s: float = 0.0
    cpu_s: float = 0.0
    memory_mb: int | None = None
    resident_mb: int | None = None
    allowed: tuple[int, int] | None = None
    excerpt: dict[str, Any] | None = None
    cancel_reason: str = ""
    cancel_cause: str = ""
    answer: dict[str, Any] | None = None
    waits_again: bool = False
    refused: bool = False
    unstored: bool = False
    """Whether it has ended, and the store does not have its result."""
    start_is_told: bool = False
    end_is_told: bool = False
    """Whether the report of its end has gone out with its result."""
    sent_at: float | None = None
    """When its request to an outside API went out."""
    over_at: float = 0.0
    """When its task had ended, and its result was still to be stored."""
    stamp: tuple[int, int] = (0, 0)
    grant_lock: AbstractContextManager[Any] = field(default_factory=lambda: clock.lock(), repr=False)
    """Held while a change of the grant is carried out, so that the last one is the one that stands."""
    on_stop: Any = field(default=None, repr=False)
    on_resize: Any = field(default=None, repr=False)
    on_told: Any = field(default=None, repr=False)
    """Called once the report of its end is on its way, so that its environment need not remember the end any more."""

    def sent_report(self) -> list[dict[str, Any]]:
        """Return what the scheduler is to be told of its request, before its end; nothing if it made none."""
        if self.sent_at is None:
            return []
        return [{"type": "sent", "id": self.id, "attempt": self.grant["attempt"], "at": self.sent_at}]

    def report(self) -> dict[str, Any]:
        """Return what the scheduler is to be told of the end, by what is known now."""
        return {
            "type": "unknown" if self.refused or self.unstored else "finished",
            "id": self.id,
            "attempt": self.grant["attempt"],
            "status": self.status,
            "reason": self.reason,
            "cause": self.cause,
            "started_at": self.started_at,
            "execution_s": max(0.0, (self.execution_s or 0.0) - self.slept_s),
            "waited_s": self.background_s + self.slept_s,
            "slept_s": self.slept_s,
            "cpu_s": self.cpu_s,
            **({"answer": self.answer} if self.answer is not None else {}),
            **({"waits_again": True} if self.waits_again else {}),
            **({"memory_mb": self.memory_mb} if self.memory_mb is not None else {}),
            **({"resident_mb": self.resident_mb} if self.resident_mb is not None else {}),
            **({"allowed": list(self.allowed)} if self.allowed is not None else {}),
            **({"excerpt": self.excerpt} if self.excerpt is not None else {}),
        }


def call_of(task: Task) -> Call | None:
    """Return the call that the message now being run by `task` has claimed; None where it has claimed none."""
    call: Call | None = getattr(task.request, "tangram_call", None)
    return call


class NodeRuntime(Protocol):
    """What a worker process offers to the actions it runs."""

    def claim(self, action_id: str, grant: WireGrant, header: dict[str, Any]) -> Call | None:
        """Claim a try; None where it was claimed before or the grant is out of date."""

    @property
    def has_left(self) -> bool:
        """Whether no result counts any more."""


def this_node() -> NodeRuntime:
    """Return the node that the caller runs on. Raises `ActionFailed` when this is a plain Celery worker, which has nothing to grant."""
    node = runtime().part(NodeRuntime)  # type: ignore[type-abstract]
    if node is None:
        raise ActionFailed("this worker is no node: start it with `tangram worker`")
    return node


class ActionTask(Task):  # type: ignore[misc]
    """A Celery task whose calls are actions. `payload` tasks return values that are wrapped with their ACT."""

    abstract = True
    payload = False
    max_retries = 0
    # The ways in which an action ends are no surprise: Celery logs them in a line, and only other errors with a traceback.
    throws = (ActionError,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Claim and run one try of the action."""
        grant = self.request.get(GRANT_HEADER)
        if grant is None:
            raise ActionFailed(f"{self.name} was sent past the scheduler: it has no grant")
        call = this_node().claim(self.request.id, grant, self.request.get(ACTION_HEADER) or {})
        if call is None:
            raise Ignore()
        # The request is this very message's; of an action that came twice both messages have the same id.
        self.request.tangram_call = call
        try:
            value = super().__call__(*args, **kwargs)
        except ActionError as error:
            call.status, call.reason, call.cause = error.status, error.reason, error.cause
            raise
        except Exception as error:
            # In a task of this system that is a mistake of ours; in one that users have declared it is theirs.
            call.status, call.reason = "failed", f"{type(error).__name__}: {error}"[:1000]
            call.cause = "worker_failed" if self.payload else "error"
            raise
        finally:
            call.over_at = clock.time()
            if call.execution_s is None:
                call.execution_s = clock.monotonic() - call.began
            if this_node().has_left:
                log.warning("the result of action %s is dropped: its node leaves", call.id)
                call.refused = True
                raise Ignore()
        if call.waits_again:
            raise Ignore()
        return self._payload(call, value) if self.payload else value

    @property
    def grant(self) -> WireGrant:
        """The grant that the current call holds now: a resize changes it while the task runs."""
        call = call_of(self)
        grant: WireGrant = call.grant if call is not None else self.request.get(GRANT_HEADER)
        return grant

    @staticmethod
    def _payload(call: Call, value: Any) -> Payload:
        queue_s = max(0.0, call.grant["granted_at"] - call.grant["received_at"])
        background_s, execution_s = call.background_s, call.execution_s or 0.0
        overhead_s = max(0.0, clock.time() - call.grant["submitted_at"] - queue_s - background_s - execution_s)
        return {
            "status": call.status,
            "value": value,
            "reason": call.reason,
            "cause": call.cause,
            "dop": call.grant["units"],
            "act": {"queue_s": queue_s, "background_s": background_s, "overhead_s": overhead_s, "execution_s": execution_s},
        }


class PayloadTask(ActionTask):
    """Base of the tasks that come with the system: their results are payloads."""

    abstract = True
    payload = True
    # Celery shows the result in its log and to Flower: the status alone, since what follows may be anybody's output or file.
    resultrepr_maxsize = len("{'status': 'succeeded'")
