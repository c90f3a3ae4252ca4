"""What may happen to the scheduler: the only inputs of `Core.handle`, as frozen values.

Times inside events are seconds on the driver's clock, the same as `now`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.model import Grant, NodeSpec, ServiceSpec
from scheduler.model.lifecycle import End, ServiceState
from tangram.action import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An action came in. `submitted_at` is the trainer's clock, trusted only as far as it lies in the past.

    Of an action that an earlier scheduler had received already, `received_at` says when, and `attempt` how many tries
    of it have lost their node. Such actions begin with the next event that is not of their sort: first all of them are known.
    """

    id: str
    action: Action
    submitted_at: float
    received_at: float | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """An action that an earlier scheduler had granted is, as far as its journal knows, still running.

    It holds what `grant` says since `resized_at`, or from the start where that is None. `close_requested` says why the environment that
    a `cpu.open` opens is to be closed as soon as it stands.
    """

    id: str
    action: Action
    submitted_at: float
    received_at: float
    granted_at: float
    grant: Grant
    resized_at: float | None = None
    close_requested: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker has claimed an action and runs it since `at`."""

    id: str
    attempt: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """An action that drew on quotas had been granted at `at` by an earlier scheduler, and has ended since."""

    action: Action
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverArrived:
    """A node, asked for an action that was granted to it, says that it never got that try: nothing of it has been done."""

    id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The request of a running action went out at `at`, as its worker measured."""

    id: str
    attempt: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an outside API answered: its HTTP status, the seconds of its `Retry-After`, the tokens that it says it cost.

    `requests` are those that the worker really sent; None is what the answer does not say.
    """

    status: int
    retry_after_s: float | None = None
    tokens: int | None = None
    requests: int = 1

    @property
    def refuses(self) -> bool:
        """Whether it asks for fewer requests: 429, or 503 that says when to come again."""
        return self.status == 429 or (self.status == 503 and self.retry_after_s is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A worker has ended an action: its processes are gone and its result is stored.

    With `waits_again` no result is stored: an outside API has refused it, and its grant said that it may wait again.
    `waited_s` are the seconds in the background, less the core-seconds got there. They count as queueing; `execution_s` excludes them.
    What no worker has reported may be `told_by` the result that one has stored, or else the scheduler has to store one.
    """

    id: str
    attempt: int
    status: End
    reason: str = ""
    started_at: float | None = None
    execution_s: float = 0.0
    cpu_s: float = 0.0
    waited_s: float = 0.0
    answer: Answer | None = None
    waits_again: bool = False
    told_by: Literal["worker", "result", "scheduler"] = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """An action has got `background_cpu_s` core-seconds in the background since its start, as its worker measured."""

    id: str
    attempt: int
    background_cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A worker offers its node; a node that is up already and joins again has restarted.

    With `resumed` an earlier scheduler knew it: what there is on its cells is still to be said.
    """

    node: NodeSpec
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDescribed:
    """A worker describes a service, which is that from now on, whoever described it before."""

    service: ServiceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesDeclared:
    """A node that is up, and has said what there is on its cells, declares these services from now on, and no others."""

    node: str
    services: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """A node lives; `running` are the actions it has claimed, `environments` those it holds."""

    name: str
    running: frozenset[str] = frozenset()
    environments: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceChanged:
    """An instance of a service, named by its cells, is in a state, as its node's worker says; `reason` is that of a failure."""

    node: str
    service: str
    cell_ids: tuple[int, ...]
    state: ServiceState
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEnd:
    """How an action ended, as its stored result says: its worker could not report it any more. Seconds are 0 where it does not say."""

    id: str
    status: End
    reason: str = ""
    execution_s: float = 0.0
    cpu_s: float = 0.0

    def finished(self, attempt: int) -> Finished:
        """Return what its worker would have reported of this try, as far as that is known."""
        return Finished(
            id=self.id,
            attempt=attempt,
            status=self.status,
            reason=self.reason,
            execution_s=self.execution_s,
            cpu_s=self.cpu_s,
            told_by="result",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is gone: it said so (`left`) or its driver knows. Of its actions, `ended` had stored their results before."""

    name: str
    reason: str
    left: bool = False
    ended: tuple[StoredEnd, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOpened:
    """An environment that an earlier scheduler opened still stands on `node`.

    As far as its journal knows, it was last used at `used_at`, and was being closed for the reason `closing`.
    """

    id: str
    node: str
    job: str
    trajectory: str
    memory_mb: int = 0
    pod_core_ids: tuple[int, ...] = ()
    client: str = ""
    used_at: float | None = None
    closing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentClosed:
    """An environment stands on its node no longer, asked or not."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentGone:
    """An environment was `closed` or `lost` at `at`, on `node` where it had one, under an earlier scheduler."""

    id: str
    state: Literal["closed", "lost"]
    node: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGone:
    """A client has given no sign of life for too long: its actions are cancelled, its environments closed."""

    client: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A trainer gives up actions: by `ids`, or all of a `job`, or all of a `trajectory` of that job."""

    ids: tuple[str, ...] = ()
    job: str | None = None
    trajectory: str | None = None
    reason: str = "cancelled by the trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: deadlines, rates, leases and missed beats are looked at."""


Event = (
    Submitted
    | Resumed
    | Spent
    | NeverArrived
    | Started
    | Sent
    | Used
    | Finished
    | NodeJoined
    | NodeBeat
    | NodeLost
    | ServiceDescribed
    | ServicesDeclared
    | ServiceChanged
    | EnvironmentOpened
    | EnvironmentClosed
    | EnvironmentGone
    | ClientGone
    | Cancelled
    | Tick
)
