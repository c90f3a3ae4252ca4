"""Commands of the core to its driver: the only outputs of `Core.handle`, as frozen values, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scheduler.model import Environment, EnvironmentFacts, Evicted, Grant
from scheduler.model.copied import filled
from scheduler.model.lifecycle import End, EnvironmentState, NodeState

CANCELLED: Final = "cancelled"
"""The cause of a stop where nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Hand the action to the node of its grant; it can start there now."""

    id: str
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Change the cores of a running action to `core_ids`.

    In the `background` the action has no cores, and `units` counts its earlier ones.
    """

    id: str
    node: str
    attempt: int
    core_ids: tuple[int, ...]
    units: int
    background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """Let an environment use `allowance_mb` of memory from now on. Its paused programs go on.

    `serial` grows with each allowance that is sent, by this command or by a grant. The node drops one that a later one has overtaken.
    """

    environment: str
    node: str
    allowance_mb: int
    serial: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Have the node kill a running action; its end comes as `Finished`."""

    id: str
    node: str
    attempt: int
    reason: str
    cause: str = CANCELLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Have the node bring a service onto cells though no action waits for it. The outcome comes as `ServiceChanged`."""

    node: str
    service: str
    cell_ids: tuple[int, ...]
    evict: tuple[Evicted, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """Note that a granted action waits again."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Note the end of an action.

    With `by_worker` the result is stored already; otherwise the driver stores `status`, `reason` and `cause`. The cause is a word
    of `tangram/ends.py`. The cause and the `kind` of the action say whose fault the end is. The parts are seconds and add up to the
    ACT; `unit_s` are the core- or cell-seconds that its grants held. `memory_mb` and `resident_mb` are what the worker measured, as in
    `events.Finished`. `environment_lost_on` is the node on which the action's environment was lost, empty where it was not.
    """

    id: str
    status: End
    reason: str
    by_worker: bool
    started_at: float | None
    queue_s: float
    background_s: float = 0.0
    overhead_s: float
    execution_s: float
    cpu_s: float
    dop: int
    unit_s: float = 0.0
    memory_mb: int | None = None
    resident_mb: int | None = None
    environment_lost_on: str = ""
    cause: str = ""
    kind: str = ""

    @property
    def act_s(self) -> float:
        """Submission to end."""
        return self.queue_s + self.background_s + self.overhead_s + self.execution_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseEnvironment:
    """Have the node close an environment that no client will close any more."""

    id: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEnvironment(EnvironmentFacts):
    """Note the state of an environment, its last use and the end of a lease of its own."""

    state: EnvironmentState
    pod_core_ids: tuple[int, ...]
    reason: str = ""
    used_at: float = 0.0

    @classmethod
    def of(cls, environment: Environment, reason: str, ends_at: float | None) -> NoteEnvironment:
        """Return the note of an environment as it is now."""
        return filled(cls, environment, reason=reason, used_at=environment.last_used, ends_at=ends_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteNode:
    """Note the state of a node."""

    name: str
    state: NodeState
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteDraining:
    """Note whether a node is draining, in any state. The journal keeps it as it is; an unknown name has no row there."""

    name: str
    draining: bool


Command = Start | Resize | Allow | Stop | Restore | Requeue | Finish | CloseEnvironment | NoteEnvironment | NoteNode | NoteDraining
