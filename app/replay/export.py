"""A trace of what ran: the actions that the journal keeps of a run or a job, as a trace that replays again.

What a trainer did is read from the times of its actions, by the rules of docs/reports.md.

Commands, paths and questions are not in the trace: the journal keeps an action's message no longer than its result is on its way. A live
replay burns the CPU time that was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from app.journal.figures import CARRIED_OUT
from app.journal.history import Declarations, Declared
from app.journal.models import Action as PastAction
from scheduler.learning.durations import MEASURED, speed_on
from scheduler.live.descriptions import service_spec
from scheduler.model import QuotaSpec, ServiceSpec
from scheduler.sim.trace import KINDS, Kind, Step, Trace, TraceAction, Trajectory
from tangram.action import CELLS, CORES, MEMORY_MB, Action
from tangram.elasticity import Elasticity
from tangram.errors import TangramError

OVERLAP_S: Final = 0.005
"""Seconds that two actions must overlap to count as parallel: times come from several clocks."""

TOGETHER_S: Final = 0.5
"""Actions of a step that were submitted further apart than this are told of: the trace submits them together."""

NODE_LABEL: Final = "node:"
_DIGITS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A trace, and in a line each what it does not hold as it was."""

    trace: Trace
    notes: tuple[str, ...]


class _Done(NamedTuple):
    """An action that goes into the trace, and when its result was there."""

    recorded: TraceAction
    past: PastAction
    session: str | None
    finished_at: float


@dataclass(slots=True)
class _Rollout:
    """What one trajectory did: its actions by submission, and its environments."""

    job: str
    name: str
    first: PastAction
    priority: int
    done: list[_Done] = field(default_factory=list)
    opened: list[PastAction] = field(default_factory=list)
    memory_mb: int = 0
    labels: dict[str, None] = field(default_factory=dict)
    open_environments: int = 0


@dataclass(slots=True)
class _LeftOut:
    reasons: Counter[str] = field(default_factory=Counter)
    apart: int = 0


def export(found: Declarations, quotas: Mapping[str, QuotaSpec]) -> Exported:
    """Make a trace of recorded actions, with what they declared, by submission.

    `quotas` are the limits of quotas, as far as they are known. Of others the trace has what was seen of them at most. Raises
    `TangramError` when none of the actions was carried out.
    """
    left_out = _LeftOut()
    rollouts = [rollout for rollout in _rollouts(found.actions, left_out) if rollout.done]
    if not rollouts:
        raise TangramError("none of these actions was carried out, so there is nothing to replay")
    began = min(rollout.first.submitted_at for rollout in rollouts)
    trajectories = tuple(_trajectory(rollout, began, left_out) for rollout in rollouts)
    done = [one for rollout in rollouts for one in rollout.done]
    calls: dict[str, list[_Done]] = {}
    for one in done:
        if one.recorded.quota is not None:
            calls.setdefault(one.recorded.quota, []).append(one)
    unknown = sorted(calls.keys() - quotas.keys())
    limits = {name: quotas[name] if name in quotas else _seen_of(name, calls[name]) for name in sorted(calls)}
    services = {name: _service(name, found.services) for name in sorted({one.recorded.service for one in done if one.recorded.service})}
    trace = Trace(trajectories=trajectories, services=services, quotas=limits)
    return Exported(trace=trace, notes=tuple(_notes(left_out, unknown)))


def _rollouts(actions: Sequence[Declared], left_out: _LeftOut) -> list[_Rollout]:
    rollouts: list[_Rollout] = []
    current: dict[tuple[str, str], _Rollout] = {}
    copies: Counter[tuple[str, str]] = Counter()
    for past, header in actions:
        declared = Action.from_header(header)
        key = (past.job, past.trajectory or past.environment or past.id)
        rollout = current.get(key)
        if rollout is None or (past.kind == "cpu.open" and rollout.opened and not rollout.open_environments):
            copies[key] += 1
            name = key[1] if copies[key] == 1 else f"{key[1]}#{copies[key]}"
            rollout = current[key] = _Rollout(past.job, name, past, declared.priority)
            rollouts.append(rollout)
        _add(rollout, past, declared, left_out)
    return rollouts


def _add(rollout: _Rollout, past: PastAction, declared: Action, left_out: _LeftOut) -> None:
    if past.kind == "cpu.open":
        rollout.opened.append(past)
        rollout.open_environments += past.status == "succeeded"
        rollout.memory_mb = max(rollout.memory_mb, declared.cost.least(MEMORY_MB))
        rollout.labels |= dict.fromkeys(label for label in declared.requires if not label.startswith(NODE_LABEL))
    elif past.kind == "cpu.close":
        rollout.open_environments -= 1
    elif past.status not in CARRIED_OUT:
        left_out.reasons[past.status] += 1
    elif (kind := _kind(declared)) is None:
        left_out.reasons[past.kind] += 1
    else:
        rollout.done.append(_Done(_recorded(kind, past, declared, rollout.priority), past, _session(past, declared), _finished_at(past)))


def _kind(declared: Action) -> Kind | None:
    """Return the kind that an action has in a trace; a Celery task that is an action is known by what it asks for."""
    for kind in KINDS:
        if kind == declared.kind:
            return kind
    if CORES in declared.cost.amounts:
        return "cpu.exec"
    return "api.call" if declared.cost.quotas else None


def _recorded(kind: Kind, past: PastAction, declared: Action, priority: int) -> TraceAction:
    execution_s = past.execution_s or 0.0
    units = declared.units if declared.cost.key in (CORES, CELLS) else (1,)
    quota = past.quota if kind == "api.call" else None
    on_cpu = kind.startswith("cpu.")
    return TraceAction(
        kind=kind,
        work_s=round(execution_s * speed_on(declared.curve, max(float(units[0]), _held(past))), _DIGITS),
        elasticity=Elasticity(units=units, curve=declared.curve),
        action_class=declared.action_class or (past.kind if kind != past.kind else None),
        service=past.service if kind.startswith("gpu.") else None,
        quota=quota,
        tokens=declared.cost.tokens(quota) or None if quota is not None else None,
        requires=() if on_cpu else tuple(label for label in declared.requires if not label.startswith(NODE_LABEL)),
        cpu_s=round(past.cpu_s, _DIGITS) if past.kind == MEASURED and past.cpu_s is not None else None,
        observed_s=round(execution_s, _DIGITS),
        timeout_s=declared.timeout_s,
        # A replay takes what is not on cores to be idempotent where a trace does not say.
        idempotent=None if declared.idempotent == (not on_cpu) else declared.idempotent,
        preemptible=declared.preemptible,
        priority=None if declared.priority == priority else declared.priority,
        memory_mb=past.memory_mb if past.memory_mb is not None else declared.cost.least(MEMORY_MB) or None,
        resident_mb=past.resident_mb,
    )


def _held(past: PastAction) -> float:
    """Return the units that an action held on average. In the background it holds none, and that time is not in its execution."""
    held_s = past.ended_at - past.granted_at if past.ended_at is not None and past.granted_at is not None else 0.0
    if past.attempts == 1 and past.unit_s and held_s > 0:
        return past.unit_s / held_s
    return float(past.units or 1)


def _session(past: PastAction, declared: Action) -> str | None:
    """Return what an action occupies alone: the session of a command."""
    return f"{past.environment} {declared.session or ''}" if past.kind == "cpu.exec" else None


def _finished_at(past: PastAction) -> float:
    """Return when the worker was done: the trainer has the result then, and the scheduler notes the end a little later.

    How much later is the part of the overhead that is neither the way to the scheduler nor that to the worker.
    """
    if past.ended_at is None or past.started_at is None or past.granted_at is None:
        return past.ended_at or past.submitted_at
    came_s = past.granted_at - (past.queue_s or 0.0) - past.submitted_at
    return past.ended_at - max(0.0, (past.overhead_s or 0.0) - came_s - max(0.0, past.started_at - past.granted_at))


def _trajectory(rollout: _Rollout, began: float, left_out: _LeftOut) -> Trajectory:
    steps, free_at = [], rollout.first.submitted_at
    for together in _steps(rollout.done):
        at = together[0].past.submitted_at
        opened = [one.ended_at for one in rollout.opened if one.ended_at is not None and one.ended_at <= at]
        think_s = max(0.0, at - max(free_at, *opened, rollout.first.submitted_at))
        actions = tuple(one.recorded for one in together)
        if rollout.labels:
            actions = tuple(replace(one, requires=tuple(rollout.labels)) if one.kind.startswith("cpu.") else one for one in actions)
        steps.append(Step(actions=actions, think_s=round(think_s, _DIGITS)))
        free_at = max(free_at, *(one.finished_at for one in together))
        left_out.apart += together[-1].past.submitted_at - at > TOGETHER_S
    return Trajectory(
        trajectory=rollout.name,
        steps=tuple(steps),
        job=rollout.job,
        arrival_s=round(rollout.first.submitted_at - began, _DIGITS),
        priority=rollout.priority,
        memory_mb=rollout.memory_mb or None,
    )


def _steps(done: Sequence[_Done]) -> Iterator[list[_Done]]:
    """Give the actions that overlapped, together."""
    together: list[_Done] = []
    for one in done:
        parallel = together and one.past.submitted_at < max(other.finished_at for other in together) - OVERLAP_S
        if not parallel or any(one.session is not None and one.session == other.session for other in together):
            if together:
                yield together
            together = []
        together.append(one)
    if together:
        yield together


def _service(name: str, described: Mapping[str, Mapping[str, object]]) -> ServiceSpec:
    if name not in described:
        raise TangramError(f"the journal does not know service {name!r} any more")
    return service_spec(name, described[name])


def _seen_of(name: str, calls: Sequence[_Done]) -> QuotaSpec:
    """Return limits that let through what was seen of a quota, and no more."""
    began = sorted(one.past.granted_at or one.past.submitted_at for one in calls)
    ended = sorted(one.finished_at for one in calls)
    at_once = most = first = 0
    for number, at in enumerate(began):
        at_once = max(at_once, number + 1 - bisect_right(ended, at))
        while began[first] <= at - 1.0:
            first += 1
        most = max(most, number + 1 - first)
    return QuotaSpec(name=name, rate_per_s=float(most), concurrency=max(1, at_once))


def _notes(left_out: _LeftOut, unknown: Sequence[str]) -> Iterator[str]:
    if left_out.reasons:
        each = ", ".join(f"{count} {word}" for word, count in sorted(left_out.reasons.items()))
        yield f"left out, their time counted as thinking: {each}"
    if left_out.apart:
        yield f"in {left_out.apart} steps actions overlapped that were submitted one after another; the trace submits them together"
    if unknown:
        yield (
            f"the limits of {', '.join(unknown)} are not known here (TANGRAM_SERVICES_FILE names the file that declares them); "
            "the trace has the most that was seen"
        )
