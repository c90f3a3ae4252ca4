"""The cluster now, on one page: what is granted, used and idle, what waits, which job loses actions to us, which node is sick.

`read_present` asks the journal a few questions that all go over indexes of what has not ended. `overview` puts the answers together
with what ended lately (`recent.py`) and with what the scheduler shows of itself (`scheduler/live/document.py`). Nothing is written here.
The keys of the document are described in docs/operating.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from app.journal.database import size_mb
from app.journal.environments import SILENCE_S
from app.journal.models import ABSENT, NODE_UP, RUNNING, WAITING, Action, AnyRow, Environment, Node, ServiceInstance, table
from app.journal.recent import Recent, Tally
from app.journal.unfinished import set_aside
from scheduler.live.entries import SetAside
from scheduler.model.copied import filled
from tangram.action import CELLS, CORES

_FIGURES = (
    "shown_ago_s",
    "shard",
    "policy",
    "epoch",
    "waiting",
    "running",
    "decisions",
    "resizes",
    "restores",
    "decision_us_p50",
    "decision_us_p99",
    "beat_s",
)
Document = dict[str, Any]

HOST_LABEL = "host:"
"""What the label of a node begins with that names its host, where several nodes share one."""


@dataclass(frozen=True, slots=True)
class Held:
    """A running action and what its present grant holds; `in_pod` says that its environment has cores of its own."""

    id: str
    attempt: int
    job: str
    kind: str
    service: str
    environment: str
    node: str
    resource: str
    core_ids: tuple[int, ...]
    cell_ids: tuple[int, ...]
    background: bool
    since: float
    resized_at: float | None
    in_pod: bool

    @property
    def key(self) -> str:
        """What names this attempt: the action's id, with the number of a later attempt."""
        return self.id if self.attempt == 1 else f"{self.id}:{self.attempt}"

    @property
    def lanes(self) -> tuple[int, ...]:
        """The cores or cells that are its own now; none in the background."""
        return () if self.background else self.cell_ids or self.core_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """What the journal knows of `at`: rows of nodes and instances, running actions, and groups of what waits or stands."""

    at: float
    nodes: Sequence[AnyRow]
    instances: Sequence[AnyRow]
    held: tuple[Held, ...]
    waiting: Sequence[AnyRow]
    environments: Sequence[AnyRow]
    clients: Sequence[AnyRow]
    set_aside: tuple[SetAside, ...]
    journal_mb: float


def read_present(connection: Connection, now: float) -> Present:
    """Read what has not ended."""
    columns = (Action.id, Action.attempts.label("attempt"), Action.job, Action.kind, Action.service, Action.environment, Action.node)
    held = (Action.resource, Action.core_ids, Action.cell_ids, Action.background, Action.granted_at.label("since"), Action.resized_at)
    place = (Environment.id == Action.environment) & Environment.ended_at.is_(None)
    running = select(*columns, *held, Environment.pod_cores).join_from(Action, Environment, place, isouter=True)
    running = running.where(Action.ended_at.is_(None), Action.status == RUNNING)
    alike = (Action.job, Action.kind, Action.quota, Action.service)
    waiting = select(*alike, func.count().label("actions"), func.min(Action.submitted_at).label("oldest"))
    waiting = waiting.where(Action.ended_at.is_(None), Action.status == WAITING).group_by(*alike)
    stand = (Environment.node, Environment.state)
    sums = (func.sum(Environment.memory_mb).label("memory_mb"), func.sum(Environment.pod_cores).label("pod_cores"))
    environments = select(*stand, func.count().label("environments"), *sums)
    environments = environments.where(Environment.ended_at.is_(None)).group_by(*stand)
    whose = (Environment.client, Environment.owner, Environment.job)
    clients = select(*whose, func.count().label("environments")).group_by(*whose)
    clients = clients.where(Environment.ended_at.is_(None), Environment.client != "")
    return Present(
        at=now,
        nodes=connection.execute(select(table(Node)).order_by(Node.state != NODE_UP, Node.name)).all(),
        instances=connection.execute(select(table(ServiceInstance)).order_by(ServiceInstance.service, ServiceInstance.node)).all(),
        held=tuple(_held(row) for row in connection.execute(running)),
        waiting=connection.execute(waiting).all(),
        environments=connection.execute(environments).all(),
        clients=connection.execute(clients).all(),
        set_aside=set_aside(connection),
        journal_mb=size_mb(connection),
    )


def _held(row: AnyRow) -> Held:
    ids = {"core_ids": tuple(row.core_ids), "cell_ids": tuple(row.cell_ids)}
    names = {"service": row.service or "", "environment": row.environment or ""}
    return filled(Held, row, **ids, **names, background=bool(row.background), in_pod=bool(row.pod_cores))


def lanes_of(description: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids of a node's cores and of its cells."""
    domains = description.get("domains") or [range(int(description.get("cores", 0)))]
    return sorted({int(core) for domain in domains for core in domain}), list(range(int(description.get("cells", 0))))


def overview(
    present: Present, recent: Recent, scheduler: Mapping[str, Any] | None, silent_s: Mapping[str, float | None] | None = None
) -> Document:
    """Return the document of the first page, of `/api/overview` and of `tangram top`; `silent_s` has the silences of clients."""
    by_job: defaultdict[str, Tally] = defaultdict(Tally)
    by_node: defaultdict[str, Tally] = defaultdict(Tally)
    ended = Tally()
    for group in recent:
        by_job[group.job].add(group)
        if group.node:
            by_node[group.node].add(group)
        ended.add(group)
    nodes = _nodes(present, by_node, scheduler or {})
    up = [node for node in nodes if node["state"] not in ("lost", "left")]
    return {
        "at": present.at,
        "scheduler": None if scheduler is None else {key: scheduler[key] for key in _FIGURES if key in scheduler},
        "cores": _amounts(up, "cores", [None] if _share_cores(present) else [node["cores_busy"] for node in up if node["cores"]]),
        "cells": _amounts(up, "cells", []),
        "quotas": _quotas(present, scheduler or {}),
        "queue": _queue(present),
        "waiting": sum(row.actions for row in present.waiting),
        "running": len(present.held),
        "oldest_wait_s": max((max(0.0, present.at - row.oldest) for row in present.waiting), default=0.0),
        "recent": ended.document(),
        "jobs": _jobs(present, by_job, scheduler or {}),
        "nodes": nodes,
        "services": _services(present),
        "environments": dict(_by_state(present)),
        "silent": _silent(present, silent_s or {}),
        "starting": (scheduler or {}).get("starting"),
        "journal_mb": round(present.journal_mb, 1),
        "set_aside": [
            {"kind": one.kind, "action": one.action, "error": one.error, "failed_at": one.failed_at} for one in present.set_aside
        ],
    }


def _amounts(nodes: Iterable[Document], what: str, busy: Sequence[float | None]) -> Document:
    """Return how many there are, and how many are granted, used and idle; `used` is null where `busy` lacks a measure."""
    total, granted = sum(node[what] for node in nodes), sum(node[f"{what}_granted"] for node in nodes)
    measured = [one for one in busy if one is not None]
    used = round(sum(measured), 2) if measured and len(measured) == len(busy) else None
    return {"total": total, "granted": granted, "idle": max(0, total - granted), "used": used}


def _share_cores(present: Present) -> bool:
    """Say whether nodes that are up offer the same core of a host, whose use would be counted once for each."""
    seen: set[tuple[str, int]] = set()
    for row in present.nodes:
        host = next((str(label) for label in row.description.get("labels", ()) if str(label).startswith(HOST_LABEL)), "")
        if not host or row.state in ("lost", "left"):
            continue
        own = {(host, core) for core in lanes_of(row.description)[0]}
        if own & seen:
            return True
        seen |= own
    return False


def _nodes(present: Present, by_node: Mapping[str, Tally], scheduler: Mapping[str, Any]) -> list[Document]:
    held: dict[str, list[Held]] = {}
    for one in present.held:
        held.setdefault(one.node, []).append(one)
    shown, shown_ago_s = scheduler.get("nodes", {}), scheduler.get("shown_ago_s", 0.0)
    return [
        _node(
            row,
            held.get(row.name, []),
            [group for group in present.environments if group.node == row.name],
            by_node.get(row.name) or Tally(),
            shown.get(row.name, {}),
            shown_ago_s,
        )
        for row in present.nodes
    ]


def _node(
    row: AnyRow, here: Sequence[Held], stand: Sequence[AnyRow], tally: Tally, shown: Mapping[str, Any], shown_ago_s: float
) -> Document:
    description = row.description
    cores, cells = lanes_of(description)
    labels = [str(label) for label in description.get("labels", ())]
    # The cores of a pod are granted for as long as its environment stands, whether an action runs on them or not.
    held = {core for one in here for core in one.core_ids if one.resource == CORES and not one.background and not one.in_pod}
    pods = sum(int(group.pod_cores or 0) for group in stand)
    beat_ago_s = shown.get("beat_ago_s")
    return {
        "name": row.name,
        "state": row.state,
        "draining": row.draining,
        "shard": row.shard,
        "reason": row.reason,
        "since": row.changed_at,
        "kinds": list(description.get("kinds", ())),
        "isolation": next((label.removeprefix("isolation:") for label in labels if label.startswith("isolation:")), ""),
        "labels": labels,
        "cores": len(cores),
        "cores_granted": len(held) + pods,
        "cores_busy": shown.get("busy_cores"),
        "cells": len(cells),
        "cells_granted": len({cell for one in here for cell in one.cell_ids}),
        "memory_mb": int(description.get("memory_mb", 0)),
        "memory_held_mb": sum(int(group.memory_mb or 0) for group in stand),
        "memory": shown.get("memory"),
        "running": len(here),
        "background": sum(one.background for one in here),
        "environments": sum(group.environments for group in stand),
        "beat_ago_s": None if beat_ago_s is None else beat_ago_s + shown_ago_s,
        "rests_s": shown.get("rests_s"),
        "ended": tally.ended,
        "ours": tally.ours,
        "causes": dict(tally.causes.most_common()),
        "ours_first": tally.ours_first,
        "ours_last": tally.ours_last,
    }


def _queue(present: Present) -> list[Document]:
    """Return what waits by job and kind, what has waited longest first."""
    groups: dict[tuple[str, str], Document] = {}
    for row in present.waiting:
        group = groups.setdefault((row.job, row.kind), {"job": row.job, "kind": row.kind, "waiting": 0, "oldest_s": 0.0})
        group["waiting"] += row.actions
        group["oldest_s"] = max(group["oldest_s"], present.at - row.oldest)
    return sorted(groups.values(), key=lambda group: (-group["oldest_s"], group["job"], group["kind"]))


def _waiting_by(present: Present, column: str) -> Counter[str]:
    """Return how many actions wait, by a column of theirs; empty where they have nothing there."""
    waiting: Counter[str] = Counter()
    for row in present.waiting:
        waiting[getattr(row, column) or ""] += row.actions
    return waiting


def _quotas(present: Present, scheduler: Mapping[str, Any]) -> list[Document]:
    waiting = _waiting_by(present, "quota")
    return [
        {"name": name, **shown, "waiting": sum(waiting[quota] for quota in shown["names"])}
        for name, shown in sorted(scheduler.get("quotas", {}).items())
    ]


def _jobs(present: Present, by_job: Mapping[str, Tally], scheduler: Mapping[str, Any]) -> list[Document]:
    """Return the jobs that have actions or had some lately, those that lose most to the infrastructure first."""
    running, waiting, cores = Counter(one.job for one in present.held), _waiting_by(present, "job"), Counter[str]()
    for one in present.held:
        cores[one.job] += len(one.lanes)
    shares = scheduler.get("jobs", {})
    jobs = [
        {
            "name": name,
            "running": running[name],
            "waiting": waiting[name],
            "units": cores[name],
            **{key: shares.get(name, {}).get(key) for key in ("share", "share_of", "entitlement", "over")},
            "held_back": scheduler.get("held_back", {}).get(name),
            **(by_job.get(name) or Tally()).document(),
        }
        for name in sorted({*running, *waiting, *by_job})
    ]
    return sorted(jobs, key=lambda job: (-job["ours"], -job["waiting"], -job["running"], job["name"]))


def _services(present: Present) -> list[Document]:
    """Return the services that nodes declare or had, with where they are resident and what waits for them."""
    declared: dict[str, list[str]] = {}
    gone = {row.name for row in present.nodes if row.state in ("lost", "left")}
    for node in present.nodes:
        if node.name not in gone:
            for name in node.description.get("services", {}):
                declared.setdefault(name, []).append(node.name)
    waiting = _waiting_by(present, "service")
    running = Counter(one.service for one in present.held if one.resource == CELLS)
    states: dict[str, Counter[str]] = {name: Counter() for name in declared}
    for row in present.instances:
        if row.node not in gone and row.state != ABSENT:
            states.setdefault(row.service, Counter())[row.state] += 1
    return [
        {"name": name, "declared": declared.get(name, []), "states": dict(states[name]), "running": running[name], "waiting": waiting[name]}
        for name in sorted(states)
    ]


def _silent(present: Present, silent_s: Mapping[str, float | None]) -> list[Document]:
    """Return the clients that give no sign of life, with how many environments they have; the one that fell silent last comes first."""
    found = [
        {"client": row.client, "owner": row.owner, "job": row.job, "environments": row.environments, "silent_s": silence_s}
        for row in present.clients
        if (silence_s := silent_s.get(row.client)) is not None and silence_s > SILENCE_S
    ]
    return sorted(found, key=lambda one: (one["silent_s"], one["client"], one["job"]))


def _by_state(present: Present) -> Counter[str]:
    counts: Counter[str] = Counter()
    for row in present.environments:
        counts[row.state] += row.environments
    return counts
