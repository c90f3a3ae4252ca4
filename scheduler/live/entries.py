"""What the live scheduler writes down: one frozen value per fact, for the journal in SQL.

The service collects entries while it handles a batch of messages and hands them to a `Journal` as one group
commit; only after that are messages acknowledged and grants sent. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from scheduler.model.commands import Finish
from scheduler.model.events import EnvironmentGone
from scheduler.model.lifecycle import End, EnvironmentState, NodeState, ServiceState


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionReceived:
    """An action came in; `header` is `Action.to_header()`, `message` the whole Celery message as JSON text."""

    id: str
    header: Mapping[str, Any]
    message: str
    submitted_at: float
    received_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGranted:
    """An action was given resources on a node: its `attempt`-th try."""

    id: str
    attempt: int
    node: str
    units: int
    core_ids: tuple[int, ...]
    cell_ids: tuple[int, ...]
    granted_at: float
    background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResized:
    """The `attempt`-th try of an action holds these cores from now on; none in the background, where `units` are those that it had."""

    id: str
    attempt: int
    core_ids: tuple[int, ...]
    units: int
    background: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequeued:
    """A granted action went back to the queue: its node was lost or never got it, or an outside API refused it."""

    id: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionEnded:
    """An action reached one of its six ends, at `at`."""

    end: Finish
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsPublished:
    """The results of these actions, which ended without a worker, are stored: their trainers know."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentChanged:
    """An environment is now in `state`.

    It goes with its `client`, unless that is empty, and was last used at `used_at`, as far as that is known.
    """

    id: str
    state: EnvironmentState
    node: str | None
    job: str
    trajectory: str
    memory_mb: int
    pod_cores: int
    at: float
    reason: str = ""
    client: str = ""
    used_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged:
    """A node is now in `state`; `description` is what its worker said when it joined."""

    name: str
    state: NodeState
    description: Mapping[str, Any]
    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceChanged:
    """The instance of a service on these cells of a node is now in `state`.

    `memory_mb` and `host_mb` are the measured MiB that it holds on its cells and in host memory; the rest counts since its worker began.
    """

    node: str
    service: str
    cell_ids: tuple[int, ...]
    state: ServiceState
    at: float
    reason: str = ""
    memory_mb: float = 0.0
    host_mb: float = 0.0
    starts: int = 0
    restores: int = 0
    evictions: int = 0
    leaks: int = 0
    wrong_answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesForgotten:
    """Whatever was known of the instances on a node is over: its worker says anew which there are."""

    node: str
    at: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFailed:
    """The scheduler of this `epoch` failed on a message and stops; `message` is its key (`scheduler/live/poison.py`).

    `action` is the action that it is about, if any. `traceback` is that of the exception, as Python prints it.
    """

    message: str
    kind: str
    action: str | None
    epoch: int
    traceback: str
    at: float


Entry = (
    ActionReceived
    | ActionGranted
    | ActionResized
    | ActionRequeued
    | ActionEnded
    | EndsPublished
    | EnvironmentChanged
    | NodeChanged
    | InstanceChanged
    | InstancesForgotten
    | MessageFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedAction:
    """An action as the journal knew it when the scheduler before this one stopped.

    `grant` is what it holds, after all resizes, since the time at which its try began; the last resize was `resized_at`.
    `attempts` counts its grants.
    """

    id: str
    header: Mapping[str, Any]
    message: str
    submitted_at: float
    received_at: float
    grant: ActionGranted | None
    attempts: int = 0
    resized_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentAction:
    """An ended action that drew on quotas, and when it was granted."""

    header: Mapping[str, Any]
    granted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpublishedEnd:
    """An action that ended lately without a worker, and of whose result nobody knows whether it was stored."""

    id: str
    message: str
    status: End
    reason: str
    environment_lost_on: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A message on which `failures` schedulers failed, and which the core is not given again; `error` is the last line of the traceback."""

    message: str
    kind: str
    action: str | None
    failures: int
    error: str
    failed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """All that a restarted scheduler goes on with, in order of reception.

    `ended` are the ids of actions that ended lately: a message of theirs that comes again is old. `spent` are those of
    them that drew on quotas, in the order of their grants, `unpublished` those whose trainers may still wait. `gone` are the environments
    that were closed or lost lately, the oldest first. `set_aside` are the messages that the core is not to be given. `pods`
    are the cores of the environments that hold some for themselves, by environment.
    """

    actions: Sequence[UnfinishedAction]
    environments: Sequence[EnvironmentChanged]
    nodes: Sequence[NodeChanged]
    ended: Sequence[str] = ()
    spent: Sequence[SpentAction] = ()
    unpublished: Sequence[UnpublishedEnd] = ()
    gone: Sequence[EnvironmentGone] = ()
    set_aside: Sequence[SetAside] = ()
    pods: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Journal(Protocol):
    """Where entries are kept."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Commit `entries`, in order, in one transaction."""

    def unfinished(self) -> Unfinished:
        """Load what had not ended."""
