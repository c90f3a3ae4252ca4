"""Events of the scheduler: the only inputs of `Core.handle`, as frozen values.

Times inside events are seconds on the driver's clock, the same as `now`.

Some events are workers' reports as they are on the wire (`scheduler/live/reports.py`). The types of their fields say what a worker may
tell. They are checked when a report is read, not when an event is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from scheduler.model import EnvironmentFacts, Grant, NodeSpec, ServiceSpec
from scheduler.model.copied import shared
from scheduler.model.lifecycle import End, ServiceState
from tangram.action import Action

Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 60)]
Flag = Annotated[bool, Field(strict=True)]
Word = Annotated[str, Field(strict=True, min_length=1)]
Text = Annotated[str, Field(strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """An action came in. `submitted_at` is the trainer's clock, trusted only if it lies in the past.

    An earlier scheduler may have received it: then `received_at` says when. `attempt` counts the tries that lost their node, and `unit_s`
    the unit-seconds that these held. Such actions start only at the next event of another type. By then all are known.
    """

    id: str
    action: Action
    submitted_at: float
    received_at: float | None = None
    attempt: int = 0
    unit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """By the journal, an action that an earlier scheduler had granted is still running.

    The action has held its `grant` since `resized_at`, or from the start with None, and had `unit_s` unit-seconds before. If it is a
    `cpu.open`, `close_requested` and `close_cause` say why to close the environment as soon as it stands. If its node is gone, its driver
    has given the try up, and `ended` is the result that its worker had stored before.
    """

    id: str
    action: Action
    submitted_at: float
    received_at: float
    granted_at: float
    grant: Grant
    resized_at: float | None = None
    unit_s: float = 0.0
    close_requested: str = ""
    close_cause: str = ""
    ended: StoredEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker has claimed an action and runs it since `at`."""

    id: Word
    attempt: Count
    at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """An action that drew on quotas had been granted at `at` by an earlier scheduler, and has ended since."""

    action: Action
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Amounts by resource: what is `offered`, and what each active job has `held` of it."""

    offered: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElsewhere:
    """What the other shards offer now, and what jobs hold there: units of cores, cells and requests; memory and start slots."""

    units: Holdings
    memory: Holdings


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverArrived:
    """A node reports that it never received a try of an action that was granted to it. Nothing of the try has been done."""

    id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The request of a running action went out at `at`, as its worker measured."""

    id: Word
    attempt: Count
    at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of an outside API: its HTTP status, 0 where none came, the seconds of its `Retry-After`, its cost in tokens.

    `requests` counts the requests that the worker really sent. A value that the answer does not give is None.
    """

    status: Count
    retry_after_s: Seconds | None = None
    tokens: Count | None = None
    requests: Count = 1

    @property
    def refuses(self) -> bool:
        """Whether it asks for fewer requests: 429, or 503 that says when to come again."""
        return self.status == 429 or (self.status == 503 and self.retry_after_s is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFacts:
    """What a worker's report and a stored result say alike of the end of an action.

    `cause` is a word of `tangram/ends.py`, empty where the worker names none.
    """

    id: Word
    status: End
    reason: Text = ""
    execution_s: Seconds = 0.0
    cpu_s: Seconds = 0.0
    cause: Text = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(EndFacts):
    """A worker has ended an action: its processes are gone and its result is stored.

    With `waits_again` no result is stored. An outside API has refused the action, and the grant allows that. `waited_s` are the seconds in
    the background, less the core-seconds got in the background; `execution_s` excludes them. The action slept by its own will for `slept_s`
    of them, which count as execution in the ACT; the others are its background part. `told_by` names the source of this end: the worker's
    report, a stored result, or the scheduler, which then has to store a result. `memory_mb` is the most that the action's environment held
    while it ran, `resident_mb` what the environment holds after its last running action; None if unknown. `allowance_serial` is the number
    of the last allowance of this scheduler that the worker had taken in, 0 for none; None if the worker does not say.
    """

    attempt: Count
    started_at: Seconds | None = None
    waited_s: Seconds = 0.0
    slept_s: Seconds = 0.0
    answer: Answer | None = None
    waits_again: Flag = False
    told_by: Literal["worker", "result", "scheduler"] = "worker"
    memory_mb: Count | None = None
    resident_mb: Count | None = None
    allowance_serial: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWanted:
    """An environment has used up its allowance of memory, `allowance_mb`, and its programs are paused."""

    environment: Word
    allowance_mb: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """An action has got `background_cpu_s` core-seconds in the background since its start, as its worker measured."""

    id: Word
    attempt: Count
    background_cpu_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A worker offers its node, which is not there: the one before it that had its name was lost.

    With `resumed` an earlier scheduler knew the node. The node has not reported the instances on its cells yet.
    """

    node: NodeSpec
    resumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceDescribed:
    """A worker describes a service. This description replaces any earlier one."""

    service: ServiceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesDeclared:
    """A node declares exactly these services from now on. It is up, and has reported the instances on its cells."""

    node: str
    services: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An environment has ended by itself, or the next worker of its node has not adopted it. `cause` is a word of `tangram/ends.py`."""

    id: str
    reason: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The memory that an environment may use now, as its node says.

    `serial` is the number of the last allowance of this scheduler that has come there (`commands.Allow`), 0 for none.
    """

    environment: str
    allowance_mb: int
    serial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBeat:
    """A node lives. `running` are the actions that it has claimed, `environments` the environments that it holds.

    `environments` is None where a beat counts as a sign of life only, and so says nothing of them.
    `lost` are environments that the scheduler believes to stand on the node. The node reports why they ended. `allowed` is about the
    environments that were granted memory as they use it. A beat that is `excused` did not come: the driver could not hear the node, so
    its silence counts from now.
    """

    name: str
    running: frozenset[str] = frozenset()
    environments: frozenset[str] | None = frozenset()
    lost: tuple[Loss, ...] = ()
    allowed: tuple[Allowed, ...] = ()
    excused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceChanged:
    """A worker reports the state of an instance of a service, named by its cells. `reason` explains a failure."""

    node: str
    service: str
    cell_ids: tuple[int, ...]
    state: ServiceState
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEnd(EndFacts):
    """The end of an action, read from its stored result, since its worker could not report it. Unknown seconds are 0.

    `background_s` and `execution_s` are parts of the ACT.
    """

    background_s: float = 0.0

    def finished(self, attempt: int) -> Finished:
        """Return the report that the worker would have sent of this try, with the known values."""
        return Finished(**shared(EndFacts, self), attempt=attempt, waited_s=self.background_s, told_by="result")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A node has missed its beats, or takes up no grant. Its driver has given up the tries of what may run elsewhere.

    The actions in `ended` had stored their results before. Where its worker `hands_over`, nothing is given up.
    """

    name: str
    reason: str
    ended: tuple[StoredEnd, ...] = ()
    hands_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node is gone: it said so (`left`) or its driver knows. `ended` are actions whose results were stored before, `lost` its reasons."""

    name: str
    reason: str
    left: bool = False
    ended: tuple[StoredEnd, ...] = ()
    lost: tuple[Loss, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReplaced:
    """Another worker goes on with a known node, its `environments` and the actions `running` in them. `ended`, `lost`: see `NodeLost`."""

    name: str
    reason: str = ""
    """Only logs of earlier versions have one."""
    environments: frozenset[str]
    ended: tuple[StoredEnd, ...] = ()
    lost: tuple[Loss, ...] = ()
    running: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained:
    """An operator takes the node of this name out of service, or puts it back (`draining` is False); it need not be up."""

    name: str
    draining: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOpened(EnvironmentFacts):
    """By the journal, an environment that an earlier scheduler opened still stands on `node`. It was last used at `used_at`.

    If it was being closed, `closing` and `cause` are the reason and the cause.
    """

    node: str
    memory_mb: int = 0
    pod_core_ids: tuple[int, ...] = ()
    used_at: float | None = None
    closing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRenewed:
    """The lease of an environment of `job` ends `lease_s` seconds from now, or from its opening if it does not stand yet."""

    id: str
    job: str
    lease_s: float


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
    cause: str = ""


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
    cause: str = "cancelled"


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
    | MemoryWanted
    | Finished
    | NodeJoined
    | NodeBeat
    | NodeSilent
    | NodeLost
    | WorkerReplaced
    | NodeDrained
    | ServiceDescribed
    | ServicesDeclared
    | ServiceChanged
    | EnvironmentOpened
    | LeaseRenewed
    | EnvironmentClosed
    | EnvironmentGone
    | ClientGone
    | HeldElsewhere
    | Cancelled
    | Tick
)
