"""What one waiting action waits for, or one in the background, and who holds that.

Only facts are stated: what the action needs, how much of it there is, and which running actions hold it. The action's place in its queue is
the one that the scheduler shows (`scheduler/live/document.py`). Nothing is guessed: a reason that can be seen neither in the journal nor
in what the scheduler shows is not made up. Some actions wait for another one: the opening of their environment, or an earlier command of
their shell session. These lead to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, select

from app.journal.models import NODE_SILENT, RUNNING, WAITING, Action, AnyRow, Environment, Node, ServiceInstance, header_of, table
from scheduler.model.lifecycle import NODE_HELD
from scheduler.model.state import memory_of, wants_cells, wants_cores
from scheduler.quotas.answers import only_calls
from tangram.action import CELLS, CORES, QUOTA_PREFIX
from tangram.action import Action as DeclaredAction

About = Literal["", "action", "environment", "node", "service", "quota", "job"]

MOST_HOLDERS = 50
"""Holders that are named of one fact; `more` counts the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A running action, or an environment that stands, and what it holds, in words; `since` is seconds since the epoch."""

    sort: Literal["action", "environment"]
    id: str
    job: str
    kind: str
    holds: str
    node: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact about a wait, with those who hold what is missing; `about` and `name` say which page tells more."""

    text: str
    about: About = ""
    name: str = ""
    holders: tuple[Holder, ...] = ()
    more: int = 0


@dataclass(slots=True)
class _Question:
    """A waiting action, what it has declared, and where to look."""

    connection: Connection
    action: AnyRow
    declared: DeclaredAction
    scheduler: Mapping[str, Any]
    now: float
    facts: list[Fact] = field(default_factory=list)

    def say(self, text: str, about: About = "", name: str = "", holders: Iterable[Holder] = ()) -> None:
        every = tuple(holders)
        self.facts.append(Fact(text=text, about=about, name=name, holders=every[:MOST_HOLDERS], more=max(0, len(every) - MOST_HOLDERS)))


def explain(connection: Connection, action: AnyRow, scheduler: Mapping[str, Any] | None, now: float) -> tuple[Fact, ...]:
    """Return what a waiting action, a row of `actions`, waits for, the nearest cause first.

    A running one waits for its node where that is silent, for cores in the background, and for memory where its environment is paused. Of
    any other nothing is said.
    """
    ask = _Question(connection, action, DeclaredAction.from_header(header_of(action)), scheduler or {}, now)
    if action.status == RUNNING:
        for node in connection.execute(select(table(Node)).where(Node.name == action.node, Node.state == NODE_SILENT)):
            _say_silent(ask, node)
    if action.status == RUNNING and _rows(ask, Action.id == action.id, Action.background.is_(True)):
        _cores_of_environment(ask)
        _share(ask)
    if action.status == RUNNING and action.environment is not None:
        _memory(ask)
    if action.status != WAITING:
        return tuple(ask.facts)
    if scheduler is None:
        ask.say("No scheduler shows itself: none is active, or the result store cannot be read.")
    if action.attempts:
        ask.say(f"It has run before and waits again: {action.reason or 'no reason was noted'}.")
    held = ask.scheduler.get("held_back", {}).get(action.job)
    alone = action.kind == "cpu.open" or (action.environment is None and not only_calls(ask.declared))
    if held and alone and action.id not in held["trials"]:
        why = f"{held['ours']} of {held['ended']} actions that ended within a minute failed by a fault of this system"
        text = f"Job {action.job} is held back: {why}. One of {held['waiting']} is tried in {held['next_in_s']:.1f} s."
        ask.say(f"{text} If that one does not fail so, all go on.", "job", action.job)
    if action.kind == "cpu.open":
        _open(ask)
    elif action.environment is not None:
        if not _in_environment(ask):
            return tuple(ask.facts)
    elif wants_cells(ask.declared):
        _cells(ask)
    elif wants_cores(ask.declared):
        _cores(ask, _able(ask, "cpu"))
    else:
        _able(ask, "api" if only_calls(ask.declared) else "cpu")
    _quotas(ask)
    _share(ask)
    return tuple(ask.facts)


# Opening an environment


def _open(ask: _Question) -> None:
    starting = ask.scheduler.get("starting") or {}
    if starting and starting["now"] >= starting["limit"]:
        openings = _running(ask, lambda row: "a start slot", Action.kind == "cpu.open")
        ask.say(f"All {starting['limit']} start slots are taken: {starting['now']} environments are opening.", holders=openings)
    elif starting and starting["next_in_s"] > 0 and starting["waiting"]:
        text = f"The limit on starts per second lets the next environment begin in {starting['next_in_s']:.1f} s"
        ask.say(f"{text}; {starting['waiting']} wait to begin.")
    needs = memory_of(ask.declared)
    for node in _able(ask, "cpu"):
        rests_s = ask.scheduler.get("nodes", {}).get(node.name, {}).get("rests_s")
        if rests_s:
            text = f"Node {node.name} rests for {rests_s:.1f} s more: environments could not be opened there, or died there."
            ask.say(text, "node", node.name)
        stand = _standing(ask, node.name)
        limit, held = int(node.description.get("memory_mb", 0)), sum(environment.memory_mb for environment in stand)
        pods = sum(environment.pod_cores for environment in stand)
        most = node.description.get("environments_max")
        if most and len(stand) >= most:
            holders = [_env_holder(one, "a place") for one in stand]
            ask.say(f"Node {node.name} holds {_count(len(stand), 'environment')}, and takes {most} at most.", "node", node.name, holders)
        if needs and limit and held + needs > limit:
            holders = [_env_holder(one, f"{one.memory_mb} MB") for one in sorted(stand, key=lambda one: -one.memory_mb) if one.memory_mb]
            ask.say(f"It needs {needs} MB; node {node.name} has {max(0, limit - held)} of {limit} MB free.", "node", node.name, holders)
        if pods:
            holders = [_env_holder(one, _count(one.pod_cores, "core")) for one in stand if one.pod_cores]
            cores = int(node.description.get("cores", 0))
            ask.say(f"Environments hold {pods} of the {cores} cores of node {node.name} for themselves.", "node", node.name, holders)


def _standing(ask: _Question, node: str) -> Sequence[AnyRow]:
    return ask.connection.execute(select(table(Environment)).where(Environment.ended_at.is_(None), Environment.node == node)).all()


def _env_holder(environment: AnyRow, holds: str) -> Holder:
    since = environment.opened_at or environment.created_at
    return Holder(
        sort="environment",
        id=environment.id,
        job=environment.job,
        kind="environment",
        holds=holds,
        node=environment.node or "",
        since=since,
    )


# In an environment


def _in_environment(ask: _Question) -> bool:
    """Say what keeps it in its environment; return whether it is in a queue, and not waiting for another action before that."""
    action = ask.action
    environment = ask.connection.execute(select(table(Environment)).where(Environment.id == action.environment)).one_or_none()
    if environment is None or environment.state in ("waiting", "opening"):
        openings = _unfinished_here(ask, lambda row: row.kind == "cpu.open")
        state = (
            "is not open yet" if environment is None else {"waiting": "waits for a place", "opening": "is being opened"}[environment.state]
        )
        opening = next(iter(openings), None)
        ask.say(f"Its environment {state}.", "environment", action.environment, [_holder(row, "opens it") for row in openings])
        if opening is not None and opening.status == WAITING:
            ask.facts += explain(ask.connection, opening, ask.scheduler, ask.now)
        return False
    session = action.header.get("session")
    if session:
        earlier = _unfinished_here(ask, lambda row: row.header.get("session") == session and row.position < action.position)
        if earlier:
            text = f"Commands of one shell session run one after another, and {_count(len(earlier), 'earlier one')} of this session"
            ask.say(f"{text} {'has' if len(earlier) == 1 else 'have'} not ended.", "environment", action.environment, map(_holder, earlier))
            return False
    if environment.state == "closing":
        ask.say(f"Its environment is being closed: {environment.reason}.", "environment", action.environment)
        return False
    node = ask.connection.execute(select(table(Node)).where(Node.name == environment.node)).one_or_none()
    if node is not None and node.state == NODE_SILENT:
        _say_silent(ask, node)
        return False
    if wants_cores(ask.declared):
        _cores_of_environment(ask)
    return True


def _cores_of_environment(ask: _Question) -> None:
    """Say who holds the cores that actions of its environment may have: those of its pod, or of its node."""
    action = ask.action
    environment = ask.connection.execute(select(table(Environment)).where(Environment.id == action.environment)).one_or_none()
    if environment is None:
        return
    node = ask.connection.execute(select(table(Node)).where(Node.name == environment.node)).one_or_none()
    if node is not None and node.state not in ("lost", "left"):
        if environment.pod_cores:
            within = _running(ask, _cores_held, Action.environment == action.environment, Action.resource == CORES)
            ask.say(f"Its environment has {environment.pod_cores} cores of its own.", "environment", action.environment, within)
        else:
            _cores(ask, [node])


def _memory(ask: _Question) -> None:
    """Say who holds the memory of its node, where its environment is paused for want of it."""
    action = ask.action
    memory = ask.scheduler.get("nodes", {}).get(action.node, {}).get("memory") or {}
    paused_s = memory.get("paused", {}).get(action.environment)
    if paused_s is None:
        return
    wants = f"Its environment wants more memory than it was granted, and has been paused for {paused_s:.1f} s."
    ask.say(wants, "environment", action.environment)
    stand = sorted(_standing(ask, action.node), key=lambda one: -one.memory_mb)
    holders = [_env_holder(one, f"a limit of {one.memory_mb} MB") for one in stand if one.id != action.environment]
    granted = f"{memory['granted_mb']} MB of node {action.node} are granted to its environments"
    reserve = f"{memory['reserve_mb']} MB are kept, so that one of them at a time may grow to its limit"
    ask.say(f"{granted}, and {reserve}.", "node", action.node, holders)


def _unfinished_here(ask: _Question, which: Callable[[AnyRow], bool]) -> list[AnyRow]:
    """Return the unfinished actions of its environment for which `which` holds, in the order of reception."""
    here = (Action.ended_at.is_(None), Action.environment == ask.action.environment, Action.id != ask.action.id)
    return [row for row in ask.connection.execute(select(table(Action)).where(*here).order_by(Action.position)) if which(row)]


def _holder(row: AnyRow, holds: str = "") -> Holder:
    since = row.granted_at if row.status == RUNNING and row.granted_at is not None else row.submitted_at
    return Holder(sort="action", id=row.id, job=row.job, kind=row.kind, holds=holds or row.status, node=row.node or "", since=since)


# Cores


def _cores(ask: _Question, nodes: Sequence[AnyRow]) -> None:
    needs = max(1, ask.declared.cost.least(CORES))
    where = ", where its environment is" if ask.action.environment else ""
    pod = (Environment.ended_at.is_(None), Environment.pod_cores > 0, Environment.node.in_([node.name for node in nodes]))
    pods = ask.connection.execute(select(table(Environment)).where(*pod)).all()
    within = {one.id for one in pods}
    for node in nodes:
        total = int(node.description.get("cores", 0))
        rows = _rows(ask, Action.node == node.name, Action.resource == CORES, Action.background.is_(False))
        outside, here = [row for row in rows if row.environment not in within], [one for one in pods if one.node == node.name]
        held = len({core for row in outside for core in row.core_ids}) + sum(one.pod_cores for one in here)
        holders = [_holder(row, _cores_held(row)) for row in outside] + [_env_holder(one, _count(one.pod_cores, "core")) for one in here]
        text = f"It needs {_count(needs, 'core')} of node {node.name}{where}: {held} of {total} are held."
        ask.say(text, "node", node.name, holders)
        if ask.action.environment:
            _queue_position(ask, "cores", node.name, f"for the cores of node {node.name}")
    if not ask.action.environment:
        _queue_position(ask, "cores", "", "for cores of any node")


def _cores_held(row: AnyRow) -> str:
    return "in the background" if row.background else _count(len(row.core_ids), "core")


# Cells


def _cells(ask: _Question) -> None:
    service = ask.action.service or ""
    nodes = _with_labels(ask, "gpu")
    serving = [node for node in nodes if service in node.description.get("services", {})]
    if nodes and not serving:
        ask.say(f"No node that is up declares service {service}.", "service", service)
    serving = _taking(ask, serving)
    if not serving:
        return
    names = [node.name for node in serving]
    instances = ask.connection.execute(select(table(ServiceInstance)).where(ServiceInstance.node.in_(names))).all()
    own = [one for one in instances if one.service == service and one.state != "absent"]
    states = ", ".join(f"{one.state} on {one.node} cells {one.cells}" for one in own) or "resident nowhere"
    places = int(serving[0].description["services"][service].get("max_concurrency", 1))
    theirs = _running(ask, _cells_held, Action.service == service, Action.resource == CELLS)
    text = f"Service {service} is {states}. An instance runs {_count(places, 'action')} at once; {_count(len(theirs), 'action')} of it run."
    ask.say(text, "service", service, theirs)
    for node in serving:
        rows = _rows(ask, Action.node == node.name, Action.resource == CELLS)
        held, cells = len({cell for row in rows for cell in row.cell_ids}), node.description.get("cells", 0)
        others = [_holder(row, _cells_held(row)) for row in rows]
        ask.say(f"{held} of the {cells} cells of node {node.name} are held.", "node", node.name, others)
    moving = [one for one in instances if one.state in ("starting", "restoring", "evicting")]
    if moving:
        ask.say("; ".join(f"Service {one.service} is {one.state} on {one.node} cells {one.cells}" for one in moving) + ".")


def _cells_held(row: AnyRow) -> str:
    return f"{_count(len(row.cell_ids), 'cell')} for {row.service}"


# Quotas


def _quotas(ask: _Question) -> None:
    for name in ask.declared.cost.quotas:
        account = next(((key, one) for key, one in ask.scheduler.get("quotas", {}).items() if name in one["names"]), None)
        if account is None:
            continue
        key, shown = account
        if shown["throttle"] == "paused":
            ask.say(
                f"The API behind quota {name} has refused requests; it is paused for {shown['opens_in_s'] or 0:.1f} s more.", "quota", name
            )
        places, running = shown["concurrency"], shown["running"]
        if places is not None:
            holders = _running(ask, lambda row: "1 place", Action.quota.in_(shown["names"]))
            ask.say(f"{running} of {places} places of quota {name} are held.", "quota", name, holders)
        if shown["rate_per_s"] is not None and shown["opens_in_s"]:
            ask.say(
                f"Quota {name} allows {shown['rate_per_s']:g} requests a second; the next may go in {shown['opens_in_s']:.1f} s.",
                "quota",
                name,
            )
        if shown["factor"] < 1:
            ask.say(f"After refusals, quota {name} is used at {shown['factor']:.0%} of its limits.", "quota", name)
        _queue_position(ask, "quota", key, f"for quota {key}")


# What several of them need


def _share(ask: _Question) -> None:
    share = ask.scheduler.get("jobs", {}).get(ask.action.job)
    if share and share["over"]:
        text = f"Job {ask.action.job} holds {share_words(share)}; its entitlement is {share['entitlement']:.0%}."
        ask.say(f"{text} Actions of other jobs go first.", "job", ask.action.job)


def share_words(job: Mapping[str, Any]) -> str:
    """Return a job's share as the scheduler shows it, and of what, such as `40% of all cores`; `–` of one that it does not show."""
    if job["share"] is None:
        return "–"
    resource = job.get("share_of")
    if not resource:  # it holds nothing
        return f"{job['share']:.0%}"
    words = {CORES: "all cores", CELLS: "all GPU cells"}.get(resource) or f"quota {resource.removeprefix(QUOTA_PREFIX)}"
    return f"{job['share']:.0%} of {words}"


def _queue_position(ask: _Question, kind: str, name: str, words: str) -> None:
    """Say where the action stands in a queue, as the scheduler showed it last."""
    for queue in ask.scheduler.get("queues", ()):
        if (queue["kind"], queue["name"]) != (kind, name):
            continue
        first: list[str] = queue["first"]
        if ask.action.id in first:
            at = first.index(ask.action.id)
            before = ask.connection.execute(select(table(Action)).where(Action.id.in_(first[:at]))).all()
            holders = [_holder(row, f"place {first.index(row.id) + 1}") for row in sorted(before, key=lambda row: first.index(row.id))]
            ask.say(f"It is number {at + 1} of {queue['waiting']} in the queue {words}.", holders=holders)
        elif queue["waiting"] > len(first):
            ask.say(f"It is behind the first {len(first)} of {queue['waiting']} in the queue {words}.")


def _able(ask: _Question, pool: str) -> list[AnyRow]:
    """Return the nodes of a pool on which it may begin; say so where none could ever run it, and which are draining or silent."""
    return _taking(ask, _with_labels(ask, pool))


def _taking(ask: _Question, nodes: Sequence[AnyRow]) -> list[AnyRow]:
    for node in nodes:
        if node.draining:
            ask.say(f"Node {node.name} is draining: what could run elsewhere does not begin there.", "node", node.name)
        elif node.state == NODE_SILENT:
            _say_silent(ask, node)
    return [node for node in nodes if not node.draining and node.state != NODE_SILENT]


def _say_silent(ask: _Question, node: AnyRow) -> None:
    ask.say(f"Node {node.name} is silent: nothing begins there until it beats again. If it does not, it is lost.", "node", node.name)


def _with_labels(ask: _Question, pool: str) -> list[AnyRow]:
    held = select(table(Node)).where(Node.state.in_(NODE_HELD)).order_by(Node.name)
    rows = [row for row in ask.connection.execute(held) if pool in row.description.get("kinds", ())]
    there = [row for row in rows if row.shard == ask.action.shard]
    requires = set(ask.declared.requires)
    found = [node for node in there if requires <= set(map(str, node.description.get("labels", ())))]
    if rows and not there:
        ask.say(f"No node of the pool {pool} is up in shard {ask.action.shard}, to which it belongs.")
    elif not there:
        ask.say(f"No node of the pool {pool} is up.")
    elif not found:
        labels, names = ", ".join(sorted(requires)), ", ".join(node.name for node in there)
        ask.say(f"No node that is up has the labels {labels}; up are: {names}.")
    return found


def _rows(ask: _Question, *where: ColumnElement[bool]) -> Sequence[AnyRow]:
    """Return running actions with their grants, the earliest grant first."""
    running = select(table(Action)).where(Action.ended_at.is_(None), Action.status == RUNNING, *where)
    return ask.connection.execute(running.order_by(Action.granted_at)).all()


def _running(ask: _Question, holds: Callable[[AnyRow], str], *where: ColumnElement[bool]) -> list[Holder]:
    return [_holder(row, holds(row)) for row in _rows(ask, *where)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
