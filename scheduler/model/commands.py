"""What the core asks its driver to do: the only outputs of `Core.handle`, as frozen values, in order."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.model import Evicted, Grant
from scheduler.model.lifecycle import End, EnvironmentState, NodeState


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Hand the action to the node of its grant; it can start there now."""

    id: str
    grant: Grant


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Change the cores of a running action to `core_ids`; in the `background` it has none of its own, and `units` are those that it had."""

    id: str
    node: str
    attempt: int
    core_ids: tuple[int, ...]
    units: int
    background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Have the node kill a running action; its end comes as `Finished`."""

    id: str
    node: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Have the node bring a service onto cells though no action of it waits; its end comes as `ServiceChanged`."""

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

    With `by_worker` the result is stored already; otherwise the driver stores what `status` and `reason` say.
    The parts are seconds and add up to the ACT; `unit_s` are the core- or cell-seconds that its grants held.
    `environment_lost_on` is the node on which the action's environment was lost, empty where it was not.
    """

    id: str
    status: End
    reason: str
    by_worker: bool
    started_at: float | None
    queue_s: float
    overhead_s: float
    execution_s: float
    cpu_s: float
    dop: int
    unit_s: float = 0.0
    environment_lost_on: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseEnvironment:
    """Have the node close an environment that nobody will close any more."""

    id: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEnvironment:
    """Note the state of an environment, and that it was last used at `used_at`."""

    id: str
    state: EnvironmentState
    node: str | None
    job: str
    trajectory: str
    memory_mb: int
    pod_core_ids: tuple[int, ...]
    reason: str = ""
    client: str = ""
    used_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteNode:
    """Note the state of a node."""

    name: str
    state: NodeState
    reason: str = ""


Command = Start | Resize | Stop | Restore | Requeue | Finish | CloseEnvironment | NoteEnvironment | NoteNode
