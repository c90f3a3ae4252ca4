"""Recorded rollouts as values: the content of `tangram.trace/1`, without its file format.

Only frozen values and pure functions may live here. No file, no JSON, no clock, no unseeded randomness. `app.replay.traces` reads,
writes and checks traces, so these values do not check themselves again.

Shape of a trace:

| value        | holds                                                                                 |
|--------------|---------------------------------------------------------------------------------------|
| `Trace`      | trajectories in the order of the file, and the services and quotas they name          |
| `Trajectory` | one rollout: when it arrives, and its steps                                           |
| `Step`       | a pause for thought, then actions submitted together; the next step waits for all     |
| `TraceAction`| one invocation: what it is, how long it takes on one unit, what more units do to that |

`extra` holds the keys of a line that have no meaning to this project. They are kept to write the trace again, and for drivers that
use them (`files`, `url`, `items`, `exit_code` …).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from scheduler.model import QuotaSpec, ServiceSpec
from tangram.action import DEFAULT_JOB
from tangram.elasticity import Elasticity, Flat
from tangram.errors import InvalidAction

Kind = Literal["cpu.exec", "cpu.read_file", "cpu.write_file", "cpu.request", "gpu.score", "gpu.logprobs", "gpu.generate", "api.call"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_PRIORITY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAction:
    """One recorded invocation of an outside resource.

    `work_s` is `T_ori`, seconds on one unit; `cpu_s` the core-seconds really used; `observed_s` is the recorded duration, on any
    number of units. `tokens` is the cost of a request to an outside API. `memory_mb` is the most that the action's environment holds while
    the action runs, `resident_mb` what the environment holds afterwards. `None` means that the trace does not say.
    """

    kind: Kind
    work_s: float
    elasticity: Elasticity = field(default_factory=Elasticity)
    action_class: str | None = None
    command: str | None = None
    service: str | None = None
    quota: str | None = None
    tokens: int | None = None
    requires: tuple[str, ...] = ()
    cpu_s: float | None = None
    observed_s: float | None = None
    timeout_s: float | None = None
    idempotent: bool | None = None
    preemptible: bool = True
    priority: int | None = None
    memory_mb: int | None = None
    resident_mb: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    @property
    def busy(self) -> float:
        """The part of its time in which the action needs its core; 1 if the trace does not say.

        It is more than 1 for an action with a fixed number of units and no curve that keeps several cores busy.
        """
        if self.cpu_s is None or self.work_s <= 0:
            return 1.0
        units, curve = self.elasticity.units, self.elasticity.curve
        return min(float(units[0]) if len(units) == 1 and isinstance(curve, Flat) else 1.0, self.cpu_s / self.work_s)

    @property
    def floor_s(self) -> float:
        """Seconds at the best amount of units, without any queue."""
        floor_s = self.elasticity.duration_s(self.work_s, self.elasticity.best_units())
        return floor_s if self.timeout_s is None else min(floor_s, self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`think_s` seconds of the model's thinking, then `actions` submitted together."""

    actions: tuple[TraceAction, ...]
    think_s: float = 0.0
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One rollout of `job`, arriving `arrival_s` seconds after the start of the trace."""

    trajectory: str
    steps: tuple[Step, ...]
    job: str = DEFAULT_JOB
    arrival_s: float = 0.0
    priority: int = DEFAULT_PRIORITY
    memory_mb: int | None = None
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    def actions(self) -> Iterator[TraceAction]:
        """Give every action, in the order of the steps."""
        for step in self.steps:
            yield from step.actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Trajectories, and by name the services and quotas that their actions use."""

    trajectories: tuple[Trajectory, ...]
    services: Mapping[str, ServiceSpec] = field(default_factory=dict, hash=False)
    quotas: Mapping[str, QuotaSpec] = field(default_factory=dict, hash=False)
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)

    def actions(self) -> Iterator[TraceAction]:
        """Give every action, trajectory by trajectory."""
        for trajectory in self.trajectories:
            yield from trajectory.actions()


def tile(trace: Trace, count: int, spread_s: float, seed: int) -> Trace:
    """Repeat the trajectories in order to `count`, arriving at random over `spread_s` seconds.

    Every arrival is drawn afresh, uniformly, from `seed`. The first copy of a trajectory keeps its name, the
    second is called `name#2` and so on; no two trajectories of a job end up with the same name. A `count`
    below the trace's own number keeps that many from its front. Raises `InvalidAction` when `count` is below 1, `spread_s` negative, or the
    trace empty.
    """
    if count < 1:
        raise InvalidAction("tile", f"must be at least 1, not {count}")
    if not 0.0 <= spread_s < float("inf"):
        raise InvalidAction("spread", f"must be a number of seconds, 0 or more, not {spread_s}")
    if not trace.trajectories:
        raise InvalidAction("tile", "the trace has no trajectory to repeat")
    draw = random.Random(seed)
    taken = {(each.job, each.trajectory) for each in trace.trajectories}
    tiled = []
    for index in range(count):
        copy, place = divmod(index, len(trace.trajectories))
        original = trace.trajectories[place]
        name = original.trajectory if copy == 0 else _free_name(original, copy + 1, taken)
        tiled.append(replace(original, trajectory=name, arrival_s=draw.uniform(0.0, spread_s)))
    return replace(trace, trajectories=tuple(tiled))


def _free_name(original: Trajectory, copy: int, taken: set[tuple[str, str]]) -> str:
    name = f"{original.trajectory}#{copy}"
    while (original.job, name) in taken:
        name = f"{name}#{copy}"
    taken.add((original.job, name))
    return name
