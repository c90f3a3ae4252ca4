"""Turns recorded actions into actions to submit, for simulations and live replays.

Only pure functions live here.
"""

from __future__ import annotations

from scheduler.sim.trace import TraceAction, Trajectory
from tangram.action import CELLS, CORES, MEMORY_MB, QUOTA_PREFIX, TOKENS_PREFIX, Action, Cost

FILE_KINDS = ("cpu.read_file", "cpu.write_file")
"""Kinds that the worker itself carries out. They need their environment, but no core."""


def action_of(
    recorded: TraceAction, trajectory: Trajectory, *, environment: str | None, session: str | None = None, known_durations: bool = True
) -> Action:
    """Return the action that a recorded action submits again. Environment and session matter to `cpu.*` only.

    Without `known_durations`, the recorded duration is not declared, as it is unknown before the action has run.
    """
    on_cpu = recorded.kind.startswith("cpu.")
    amounts: dict[str, tuple[int, ...]]
    if recorded.kind in FILE_KINDS:
        amounts = {}
    elif on_cpu:
        amounts = {CORES: recorded.elasticity.units}
    elif recorded.kind.startswith("gpu."):
        amounts = {CELLS: recorded.elasticity.units}
    else:
        amounts = {f"{QUOTA_PREFIX}{recorded.quota}": (1,)}
        if recorded.tokens:
            amounts[f"{TOKENS_PREFIX}{recorded.quota}"] = (recorded.tokens,)
    return Action(
        kind=recorded.kind,
        cost=Cost(amounts),
        curve=recorded.elasticity.curve,
        job=trajectory.job,
        trajectory=trajectory.trajectory,
        environment=environment if on_cpu else None,
        session=session if on_cpu else None,
        service=recorded.service,
        requires=recorded.requires if not on_cpu else (),
        work_s=recorded.work_s if known_durations else None,
        timeout_s=recorded.timeout_s,
        priority=recorded.priority if recorded.priority is not None else trajectory.priority,
        idempotent=recorded.idempotent if recorded.idempotent is not None else not on_cpu,
        preemptible=recorded.preemptible,
        action_class=recorded.action_class,
    )


def opening_of(trajectory: Trajectory, environment: str) -> Action | None:
    """Return the first `cpu.open` of a trajectory; None if it never needs a sandbox.

    All actions of the environment must be able to run on its node. So the open asks for all their labels, and for the largest of
    their least numbers of cores.
    """
    on_cpu = [recorded for recorded in trajectory.actions() if recorded.kind.startswith("cpu.")]
    if not on_cpu:
        return None
    labels = dict.fromkeys(label for recorded in on_cpu for label in recorded.requires)
    amounts: dict[str, tuple[int, ...]] = {CORES: (max(recorded.elasticity.units[0] for recorded in on_cpu),)}
    if trajectory.memory_mb:
        amounts[MEMORY_MB] = (trajectory.memory_mb,)
    return Action(
        kind="cpu.open",
        cost=Cost(amounts),
        job=trajectory.job,
        trajectory=trajectory.trajectory,
        environment=environment,
        requires=tuple(labels),
        priority=trajectory.priority,
        work_s=0.0,
    )
