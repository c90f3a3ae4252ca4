"""Entries of the journal in SQL: one frozen value per fact.

The service collects entries while it handles a batch of messages and hands them to a `Journal` as one group
commit; only after that are messages acknowledged and grants sent. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from scheduler.model import EnvironmentFacts, Grant, GrantFacts, InstanceFacts
from scheduler.model.commands import Finish, NoteDraining, NoteNode, Requeue
from scheduler.model.events import EnvironmentGone, LeaseRenewed
from scheduler.model.lifecycle import End, EnvironmentState, ServiceState


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionReceived:
    """An action came in; `header` is `Action.to_header()`, `message` the whole Celery message as JSON text."""

    id: str
    header: Mapping[str, Any]
    message: str
    submitted_at: float
    received_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGranted(GrantFacts):
    """An action was given resources on a node."""

    id: str
    granted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResized:
    """The `attempt`-th try of an action holds these cores from now on.

    In the background it holds none, and `units` counts its earlier cores. `unit_s` are the core-seconds that it has held until now.
    """

    id: str
    attempt: int
    core_ids: tuple[int, ...]
    units: int
    background: bool
    at: float
    unit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRequeued(Requeue):
    """A granted action went back to the queue: its node was lost or never got the action, or an outside API refused the request.

    `unit_s` are the core- or cell-seconds that it has held until now.
    """

    at: float
    unit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionEnded:
    """An action reached one of its six ends, at `at`; `excerpt` is what is kept of a command."""

    end: Finish
    at: float
    excerpt: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsPublished:
    """The results of these actions, which ended without a worker, are stored: their trainers know."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentChanged(EnvironmentFacts):
    """An environment is now in `state`. `used_at` is its last use, if known."""

    state: EnvironmentState
    pod_cores: int
    at: float
    reason: str = ""
    used_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChanged(NoteNode):
    """A node is now in `state`. `description` is its worker's description from the join."""

    description: Mapping[str, Any]
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceChanged(InstanceFacts):
    """The instance of a service on these cells of a node is now in `state`."""

    node: str
    service: str
    cell_ids: tuple[int, ...]
    state: ServiceState
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesForgotten:
    """All known instances on a node are forgotten. Its worker reports its instances anew."""

    node: str
    at: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFailed:
    """The scheduler of this `epoch` failed on a message and stops; `message` is its key (`scheduler/live/poison.py`).

    `action` is the action of the message, if any. `traceback` is the exception's, as Python prints it.
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
    | NoteDraining
    | InstanceChanged
    | InstancesForgotten
    | MessageFailed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedAction(ActionReceived):
    """An unfinished action, by the journal of the scheduler before this one.

    `grant` is what it holds after all resizes. Its try began at `granted_at`, and the last resize was at `resized_at`. `attempts`
    counts its grants. `unit_s` are the core- or cell-seconds that it had held before its grant, or until the last resize.
    """

    grant: Grant | None
    granted_at: float | None = None
    attempts: int = 0
    resized_at: float | None = None
    unit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpentAction:
    """An ended action that drew on quotas, and when it was granted."""

    header: Mapping[str, Any]
    granted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpublishedEnd:
    """An action that ended recently without a worker. Its result may not have been stored."""

    id: str
    message: str
    status: End
    reason: str
    environment_lost_on: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A message on which `failures` schedulers failed.

    The core does not get it again. `error` is the last line of the traceback.
    """

    message: str
    kind: str
    action: str | None
    failures: int
    error: str
    failed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """The journal's content for a restarted scheduler, in order of reception.

    `ended` are the ids of actions that ended recently. Further messages with these ids are old. `spent` are the ended actions that
    drew on quotas, in the order of their grants. `unpublished` are the ended actions whose trainers may still wait. `gone` are the
    recently closed or lost environments, the oldest first. `draining` are the names of the draining nodes, up or not. `set_aside`
    are the messages that the core must not get. `pods` are the cores of pods, by environment. `away` are the nodes that were lost or left
    within a day, and may come back.
    """

    actions: Sequence[UnfinishedAction]
    environments: Sequence[EnvironmentChanged]
    nodes: Sequence[NodeChanged]
    ended: Sequence[str] = ()
    spent: Sequence[SpentAction] = ()
    unpublished: Sequence[UnpublishedEnd] = ()
    gone: Sequence[EnvironmentGone] = ()
    draining: Sequence[str] = ()
    set_aside: Sequence[SetAside] = ()
    pods: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    away: Sequence[NodeChanged] = ()

    def leases(self) -> Iterator[LeaseRenewed]:
        """Yield the leases of environments that did not stand yet. After a renewal, the open holds an old lease."""
        for kept in self.environments:
            if kept.state in ("waiting", "opening") and kept.ends_at is not None and kept.used_at is not None:
                yield LeaseRenewed(id=kept.id, job=kept.job, lease_s=round(kept.ends_at - kept.used_at, 6))


class Journal(Protocol):
    """The store of entries."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Commit `entries`, in order, in one transaction."""

    def unfinished(self) -> Unfinished:
        """Load all unfinished work."""

    def has_ended(self, action_id: str) -> bool:
        """Return whether an action is known and has ended."""
