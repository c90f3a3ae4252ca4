"""The nouns of the core: nodes, grants, actions waiting and running, environments.

Frozen values cross the border of the core; the slotted classes below them are the core's own, changed only by it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.learning.durations import Estimate, speed_on
from scheduler.learning.work_left import Life
from scheduler.model.lifecycle import ENVIRONMENT, EnvironmentState
from tangram.action import Action
from tangram.elasticity import FLAT
from tangram.ends import loss_cause

UNKNOWN = Estimate(1.0, FLAT)

ROUNDING = 1e-12
"""Part of an action's duration on its smallest amount. An amount that saves less than this part does not count as faster."""

UNLIMITED = 1 << 60
"""Memory, in MB, or environments of a node that declares no bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """What a node offers. `pools` are among `cpu`, `gpu`, `api`; memory is in MB, per cell for `cell_memory_mb`.

    `domains` are the ids of its cores, grouped by shared memory or cache, neighbours next to each other. With no domains, the place
    of the cores is unknown, and the ids are 0 to `cores` - 1. `services` are the names of the services that the node declares. With
    None, the node runs any known service. A node that `grants_memory` can change the allowance of each environment.
    It holds `environments_max` environments at most.
    """

    name: str
    pools: tuple[str, ...] = ("cpu",)
    cores: int = 0
    memory_mb: int = UNLIMITED
    cells: int = 0
    cell_memory_mb: int = UNLIMITED
    labels: frozenset[str] = frozenset()
    domains: tuple[tuple[int, ...], ...] = ()
    services: frozenset[str] | None = None
    grants_memory: bool = False
    environments_max: int = UNLIMITED

    def core_domains(self) -> tuple[Sequence[int], ...]:
        """Return the ids of its cores by domain."""
        return self.domains or (range(self.cores),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A model that can be resident on GPU cells.

    `cells` are the acceptable numbers of cells, ascending; `memory_mb` its memory on each cell; `restore_s` the expected seconds
    from host memory to resident; `max_concurrency` how many actions an instance runs at once; `instances_per_node` how many
    instances a node can hold, None for any number; `sizes` the only numbers of cells that its engine can run on, None for any
    number. Once resident, a `pinned` service is never evicted; a `warm` one is brought onto free cells when its node joins.
    """

    name: str
    cells: tuple[int, ...] = (1,)
    memory_mb: int = 0
    restore_s: float = 0.0
    max_concurrency: int = 1
    instances_per_node: int | None = None
    sizes: tuple[int, ...] | None = None
    pinned: bool = False
    warm: bool = False
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSpec:
    """The limits of an outside API: requests per second, at once, and in one burst, and tokens per minute; None for no limit.

    Quotas of one `account` share its limits; without one a quota is an account of its own. `margin` is the unused part of the
    rates. A request may be granted up to `lead_s` before its time (`scheduler/quotas/account.py`). `usage_header` names the header
    of an answer that gives its cost in tokens. `hosts` are the hosts that requests may reach. Both are for the worker that sends
    the requests.
    """

    name: str
    rate_per_s: float | None = None
    concurrency: int | None = None
    burst: int | None = None
    tokens_per_min: float | None = None
    account: str | None = None
    usage_header: str | None = None
    hosts: tuple[str, ...] = ()
    margin: float = 0.0
    lead_s: float = 0.0
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def limits(self) -> bool:
        """Whether it says a limit itself."""
        return self.rate_per_s is not None or self.concurrency is not None or self.tokens_per_min is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the system. None means no bound; times are seconds.

    `weights` are the jobs' parts of the system, 1 for a job without a weight. `window_s` is the worth of a class of priority in the
    queues for cells and quotas. `beat_s` is the time between two beats of a node. A node without a beat for `node_lost_s` is lost,
    but never before it is silent. The core looks at neither of the two, the heartbeats do. A job is held back if more than
    `breaker_share` of at least `breaker_least` of its actions failed by our fault within a minute.
    """

    queue_limit: int = 1 << 60
    breaker_share: float = 1.0
    breaker_least: int = 20
    lease_s: float | None = None
    beat_s: float | None = None
    node_lost_s: float = 0.0
    starting_limit: int = 1 << 60
    starts_per_s: float | None = None
    weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    window_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """What a worker, its reports and the journal say of an instance of a service alike.

    `reason` says why it is in its state, if that needs a reason. `memory_mb` and `host_mb` are the measured MiB on its cells and in host
    memory. The counts are since its worker began: `leaks` of evictions that did not free the memory, `wrong_answers` of restores that
    brought back spoilt weights.
    """

    reason: str = ""
    memory_mb: float = 0.0
    host_mb: float = 0.0
    starts: int = 0
    restores: int = 0
    evictions: int = 0
    leaks: int = 0
    wrong_answers: int = 0


INSTANCE_COUNTS = ("starts", "restores", "evictions", "leaks", "wrong_answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """An instance that is evicted from its cells."""

    service: str
    cell_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantFacts:
    """What an action holds on its node, in its `attempt`-th try.

    `units` is its degree of parallelism. In the `background` the action has no core of its own, and the kernel runs it on idle
    cores of the node. `units` is then the number that its program was last given.
    """

    node: str
    attempt: int = 1
    units: int = 1
    core_ids: tuple[int, ...] = ()
    background: bool = False
    cell_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant(GrantFacts):
    """The resources of a running action.

    `evict` names the instances to evict first, in order. With `restore`, the action's service must be brought onto the cells before the
    action runs. A request to an outside API goes out at `not_before`, the scheduler's time, where that is later than its arrival.
    `allowance_mb` is the memory that the action's environment may use from now on, 0 if the grant does not change it, and
    `allowance_serial` its number (`commands.Allow`).
    """

    evict: tuple[Evicted, ...] = ()
    restore: bool = False
    not_before: float = 0.0
    allowance_mb: int = 0
    allowance_serial: int = 0


@dataclass(slots=True, eq=False)
class Waiting:
    """An action in the queue; `durations_s[i]` is the estimate on `units[i]`, `unit_s` are the unit-seconds of its grants so far.

    `estimate` holds its expected work and its curve. `refused` counts the tries that an API refused or that never arrived. `life`
    is its work so far. A `preemptible` action may go to the background. Its wait for a turn counts from `contends_since`: less than
    a turn on cores does not end this wait. `reserved_on` names the node whose cores are kept for an action that may run on any
    node.
    """

    id: str
    action: Action
    seq: int
    submitted_at: float
    received_at: float
    units: tuple[int, ...]
    durations_s: tuple[float, ...]
    key: tuple[float, ...] = ()
    attempt: int = 0
    refused: int = 0
    unit_s: float = 0.0
    estimate: Estimate = UNKNOWN
    life: Life = field(default_factory=Life)
    preemptible: bool = False
    contends_since: float = 0.0
    reserved_on: str = ""
    alike: tuple[object, ...] = ()
    """The properties that actions of one service queue share (gpu/elastic.py). Empty until a round needs them."""
    least: int = field(init=False)
    """The smallest amount that it can use."""
    best: int = field(init=False)
    """The smallest amount on which it is expected to be fastest."""

    def __post_init__(self) -> None:
        """Work out what every decision asks for."""
        self.least = self.units[0]
        soon_enough = min(self.durations_s) + ROUNDING * self.durations_s[0]
        self.best = next(units for units, duration_s in zip(self.units, self.durations_s, strict=True) if duration_s <= soon_enough)

    def duration_s(self, units: int) -> float:
        """Return the estimate on `units`, which must be one of its amounts."""
        return self.durations_s[self.units.index(units)]


@dataclass(slots=True, eq=False)
class Running:
    """An action that holds a grant. `done_s` is the work, in seconds on one unit, done until `since`.

    Before its present grant the action was in the background for `background_s`. By its worker's last report, it has got
    `background_cpu_s` core-seconds in the background. It has had cores of its own since `on_cores_since`. Once the action is to
    end, `stopping` is the reason and `stop_cause` the cause.
    """

    waiting: Waiting
    grant: Grant
    granted_at: float
    expected_end: float
    started_at: float | None = None
    stopping: str = ""
    stop_cause: str = ""
    unseen_beats: int = 0
    done_s: float = 0.0
    since: float = 0.0
    held_since: float = 0.0
    background_s: float = 0.0
    background_cpu_s: float = 0.0
    on_cores_since: float = 0.0
    sent_at: float | None = None
    work_is_known: bool = True
    """Whether `done_s` and `background_s` are complete. The journal does not keep what they were at a resize under an earlier scheduler."""
    units: int = field(init=False)
    """Its present degree of parallelism."""
    speed: float = field(init=False)
    """Its speed-up on these units."""

    def __post_init__(self) -> None:
        """Work out what every decision asks for."""
        self._note_units()

    def _note_units(self) -> None:
        self.units = self.grant.units
        self.speed = 0.0 if self.grant.background else speed_on(self.waiting.estimate.curve, self.units)

    @property
    def goes_at(self) -> float:
        """When its requests went out or, until a report arrives, are to go out."""
        return self.sent_at if self.sent_at is not None else max(self.granted_at, self.grant.not_before)

    def done_at(self, now: float) -> float:
        """Return the work done by `now`, in seconds on one unit."""
        return self.done_s + max(0.0, now - self.since) * self.speed

    def background_s_at(self, now: float) -> float:
        """Return the seconds for which it has been in the background by `now`."""
        return self.background_s + (max(0.0, now - self.since) if self.grant.background else 0.0)

    def left_s(self, now: float) -> float:
        """Return the work that is expected to be left, in seconds on one unit."""
        return self.waiting.estimate.left_s(self.done_at(now))

    def held(self, now: float) -> None:
        """Add the grant's unit-seconds until now to the action's."""
        if self.grant.core_ids or self.grant.cell_ids:
            self.waiting.unit_s += self.grant.units * max(0.0, now - self.held_since)
        self.held_since = now

    def regrant(self, grant: Grant, now: float) -> None:
        """Go on under another grant of the same action."""
        self.done_s = self.done_at(now)
        self.background_s = self.background_s_at(now)
        self.since = now
        self.held(now)
        self.grant = grant
        self._note_units()
        self.expected_end = now + self.left_s(now) / self.speed if self.speed else math.inf

    def note_background(self, cpu_s: float) -> None:
        """Take in the core-seconds that the action has got in the background so far."""
        self.done_s += max(0.0, cpu_s - self.background_cpu_s)
        self.background_cpu_s = max(self.background_cpu_s, cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """What events, commands and the journal say of an environment alike.

    It ends with its `client`, which is empty for a detached environment. `cause` is the cause of its end, once it is to end
    (`tangram/ends.py`). `owner` names its owner for people. A lease of its own ends at `ends_at`. Before the environment stands, this lease
    counts from its last use.
    """

    id: str
    job: str
    trajectory: str
    memory_mb: int
    node: str | None
    client: str = ""
    cause: str = ""
    owner: str = ""
    ends_at: float | None = None


@dataclass(slots=True, eq=False)
class Environment:
    """A sandbox of a trajectory.

    `parked` are its actions that wait for the environment to open, or for an earlier action of the same shell session. `sessions`
    name the action that each session is busy with. `close_requested` is the reason for which the environment is being closed, or
    will be as soon as it stands. With `over`, the reason to close it, it is closed as soon as its last action has ended. It is
    `lost` if its node was lost or the environment ended by itself. `cause` is the cause of its end, once it is to end
    (`tangram/ends.py`).

    An environment ends with its `client`, which is empty for a detached environment. `owner` names its owner for people.
    `use_noted` is the last use that was written down. With a lease of its own, of `lease_s`, the environment is closed at
    `ends_at`, in use or not.

    An `elastic` environment is granted memory as it uses it, up to `memory_mb`, where its node can do that (`scheduler/core/memory.py`).
    It counts for its job with `counted_mb`, the memory that it was expected to hold when it was placed.

    `unseen_beats` counts the latest beats of its node, in a row, that did not name it. `requires` are the labels that its open asked for;
    a scheduler that takes over knows none.

    `life` is the work of all its actions so far, `ended_work_s` the work of the ended ones. The environment is `cut_short` if its
    trainer gave it up, or its node was lost.
    """

    id: str
    job: str
    trajectory: str
    memory_mb: int
    open_id: str
    requires: tuple[str, ...] = ()
    state: EnvironmentState = "waiting"
    node: str | None = None
    pod_core_ids: tuple[int, ...] = ()
    last_used: float = 0.0
    unseen_beats: int = 0
    parked: deque[Waiting] = field(default_factory=deque)
    sessions: dict[str, str] = field(default_factory=dict)
    actions: dict[str, None] = field(default_factory=dict)
    close_requested: str = ""
    over: str = ""
    cause: str = ""
    life: Life = field(default_factory=Life)
    ended_work_s: float = 0.0
    cut_short: bool = False
    client: str = ""
    lost: bool = False
    use_noted: float = 0.0
    owner: str = ""
    lease_s: float | None = None
    ends_at: float | None = None
    elastic: bool = False
    counted_mb: int = 0

    @property
    def end_cause(self) -> str:
        """The cause of the end of actions that wait for an environment that is over, or arrive later."""
        return loss_cause(self.cause) if self.lost else self.cause or "environment_closed"

    def enter(self, state: EnvironmentState) -> None:
        """Go over to another state. Raises `InvalidTransition` where that does not follow the present one."""
        self.state = ENVIRONMENT.next(self.state, state)
