"""The live driver: the same `Core` as in simulation, between a broker, a journal and a clock.

One thread, one loop, a batch at a time:

1. Receive what is there: actions, reports of workers, wishes of trainers.
2. Hand each to the core as an event; its commands become journal entries and outgoing messages.
3. Commit the entries as one group; only then send; acknowledge what was received last.

So an action that was acknowledged is in SQL, and an action that was started is in SQL as started. The busier the
system, the larger the batches, the fewer the commits. When the process dies between two of these steps, the broker
hands out what was not acknowledged again, and duplicates are known by their task id.

Of this package only this module knows time and messages; Celery, SQL and threads are behind its protocols.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from scheduler import commands, events
from scheduler.core import Core
from scheduler.entries import ActionEnded, ActionGranted, ActionReceived, ActionRequeued, Entry, EnvironmentChanged, Journal, NodeChanged
from scheduler.model import UNLIMITED, Grant, NodeSpec, ServiceSpec
from scheduler.summary import percentile
from tangram.action import Action
from tangram.errors import InvalidAction
from tangram.wire import ACTION_HEADER

log = logging.getLogger(__name__)

REMEMBERED_ENDS = 100_000
"""Ended actions whose ids are remembered, so that a message that comes twice is not run twice."""

REMEMBERED_DECISIONS = 20_000
"""Decisions over which the percentiles of their times are taken."""

HOUSEKEEPING_S = 0.5
"""Longest time between two looks at deadlines, beats and leases."""

RETURN_S = 5.0
"""Time that nodes have for their first beat after the broker was away."""

MOST_RESENT = 2
"""Times that a grant is sent again to a node that says that it never got it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One message: an action with its id and whole `message`, or an already decoded `body` of the other kinds."""

    sort: Literal["action", "events", "control"]
    id: str = ""
    task: str = ""
    header: Mapping[str, Any] | None = None
    message: str = ""
    body: Any = None
    tag: Any = None


class Transport(Protocol):
    """The broker, as the service needs it. Sending is buffered until `flush`."""

    def receive(self, timeout_s: float) -> list[Received]:
        """Return what has arrived, after waiting at most `timeout_s` for the first message."""

    def acknowledge(self, received: Sequence[Received]) -> None:
        """Tell the broker that these need not come again."""

    def send_action(self, node: str, message: str, grant: Mapping[str, Any]) -> None:
        """Send a stored message on to a node, under the same task id, with the header `grant`."""

    def send_control(self, node: str, task: str, arguments: Mapping[str, Any]) -> None:
        """Have a node run one of its control tasks."""

    def store_end(self, action_id: str, message: str, status: str, reason: str) -> None:
        """Store the result of an action that ends without a worker."""

    def disown(self, action_id: str, attempt: int) -> None:
        """Let the worker that has claimed this try know that its result does not count any more."""

    def flush(self) -> None:
        """Send what was buffered."""

    def show(self, figures: Mapping[str, Any]) -> None:
        """Let tools see how the scheduler is doing."""

    @property
    def caught_up(self) -> bool:
        """Whether the last `receive` brought all that there was."""

    @property
    def lost_connections(self) -> int:
        """How often the broker went away; what was sent just before may be lost."""


@dataclass(slots=True)
class _Figures:
    """Counts since this scheduler leads; `decision_us` are the last decisions' microseconds."""

    resizes: int = 0
    restores: int = 0
    decision_us: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_DECISIONS))


class Service:
    """One active scheduler."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        journal: Journal,
        *,
        epoch: int = 1,
        clock: Callable[[], float] = time.time,
        still_leading: Callable[[], bool] = lambda: True,
    ) -> None:
        self._core = core
        self._transport = transport
        self._journal = journal
        self._epoch = epoch
        self._clock = clock
        self._still_leading = still_leading
        self._messages: dict[str, str] = {}
        self._submitted_at: dict[str, float] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._incarnations: dict[str, str] = {}
        self._descriptions: dict[str, Mapping[str, Any]] = {}
        self._entries: list[Entry] = []
        self._next_housekeeping = 0.0
        self._beat_at: dict[str, float] = {}
        self._orphan_beats: dict[str, int] = {}
        self._resent: dict[str, int] = {}
        self._granted: dict[str, int] = {}
        self._looked_at = clock()
        self._lost_connections = 0
        self._excused_until = 0.0
        self._figures = _Figures()

    def recover(self) -> int:
        """Go on where the scheduler before this one stopped; return the number of unfinished actions."""
        unfinished, now = self._journal.unfinished(), self._clock()
        self._ended.update(dict.fromkeys(unfinished.ended[-REMEMBERED_ENDS:]))
        for node in unfinished.nodes:
            self._descriptions[node.name] = node.description
            self._incarnations[node.name] = str(node.description.get("incarnation", ""))
            self._handle(events.NodeJoined(node=node_spec(node.description)), now)
        for kept in unfinished.environments:
            if kept.node is not None and kept.state in ("open", "closing"):
                opened = events.EnvironmentOpened(
                    id=kept.id, node=kept.node, job=kept.job, trajectory=kept.trajectory, memory_mb=kept.memory_mb
                )
                self._handle(opened, now)
        for kept_action in unfinished.actions:
            self._messages[kept_action.id] = kept_action.message
            self._submitted_at[kept_action.id] = kept_action.submitted_at
            action = Action.from_header(kept_action.header)
            if kept_action.grant is None:
                submitted = events.Submitted(
                    id=kept_action.id,
                    action=action,
                    submitted_at=kept_action.submitted_at,
                    received_at=kept_action.received_at,
                    attempt=kept_action.attempts,
                )
                self._handle(submitted, now)
                continue
            grant = kept_action.grant
            self._granted[kept_action.id] = grant.attempt
            resumed = events.Resumed(
                id=kept_action.id,
                action=action,
                submitted_at=kept_action.submitted_at,
                received_at=kept_action.received_at,
                granted_at=grant.granted_at,
                grant=Grant(node=grant.node, attempt=grant.attempt, units=grant.units, core_ids=grant.core_ids, cell_ids=grant.cell_ids),
            )
            self._handle(resumed, now)
        self._commit([])
        return len(unfinished.actions)

    def step(self) -> bool:
        """Deal with one batch; return False once another scheduler leads."""
        now = self._clock()
        wake = self._core.next_wake(now)
        until = min(self._next_housekeeping, wake if wake is not None else self._next_housekeeping)
        batch = self._transport.receive(max(0.0, min(until - now, HOUSEKEEPING_S)))
        now = self._clock()
        housekeeping = now >= self._next_housekeeping
        if housekeeping and not self._still_leading():
            return False
        for received in batch:
            try:
                self._take(received, now)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                log.warning("a message on %s makes no sense and is dropped: %s: %s", received.sort, type(error).__name__, error)
        if housekeeping or (wake is not None and wake <= now):
            self._excuse_nodes(now)
            self._handle(events.Tick(), now)
        if housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_S
            self._show()
        self._looked_at = now
        self._commit(batch)
        return True

    def _excuse_nodes(self, now: float) -> None:
        """Count a beat for every node while this scheduler could not hear them: silence is then no sign of theirs."""
        if self._transport.lost_connections != self._lost_connections:
            self._lost_connections = self._transport.lost_connections
            self._excused_until = float("inf")
        stalled = now - self._looked_at > HOUSEKEEPING_S + (self._core.state.limits.beat_s or 0.0)
        if not self._transport.caught_up or stalled or now < self._excused_until:
            for name in list(self._core.state.nodes):
                self._count_beat(name, now)
        if self._excused_until == float("inf") and self._transport.caught_up:
            self._excused_until = now + RETURN_S
            self._repeat_orders()

    def _repeat_orders(self) -> None:
        """Send again what may have been lost with a broker's connection; each is harmless when it comes twice."""
        for running in self._core.state.running.values():
            grant, action_id = running.grant, running.waiting.id
            if running.stopping:
                arguments = {"id": action_id, "attempt": grant.attempt, "reason": running.stopping}
                self._transport.send_control(grant.node, "tangram.stop", arguments)
            elif grant.core_ids and running.started_at is not None:
                arguments = {"id": action_id, "attempt": grant.attempt, "core_ids": list(grant.core_ids)}
                self._transport.send_control(grant.node, "tangram.resize", arguments)

    def _commit(self, batch: Sequence[Received]) -> None:
        entries, self._entries = self._entries, []
        if entries:
            self._journal.write(entries)
        self._transport.flush()
        if batch:
            self._transport.acknowledge(batch)

    def _take(self, received: Received, now: float) -> None:
        if received.sort == "action":
            self._take_action(received, now)
        elif received.sort == "events":
            for event in received.body["events"]:
                self._take_report(event, now)
        else:
            self._take_wish(received.body, now)

    def _take_action(self, received: Received, now: float) -> None:
        if received.id in self._messages or received.id in self._ended:
            return
        described = isinstance(received.header, Mapping)
        header = dict(received.header) if isinstance(received.header, Mapping) else {}
        submitted_at = header.pop("submitted_at", now)
        if isinstance(submitted_at, bool) or not isinstance(submitted_at, (int, float)) or not now - 86_400 <= submitted_at <= now:
            submitted_at = now
        self._messages[received.id] = received.message
        self._submitted_at[received.id] = submitted_at
        try:
            if not described:
                raise InvalidAction(
                    received.task, "the message does not describe its action: send it with `tangram.Client` or `app.routing`"
                )
            if header.get("kind") != received.task:
                raise InvalidAction("kind", f"the message is for the task {received.task!r}, its header says {header.get('kind')!r}")
            action = Action.from_header(header)
        except (InvalidAction, TypeError) as error:
            self._refuse_unreadable(received, str(error), submitted_at, now)
            return
        self._note_received(received.id, action, received.message, submitted_at, now)
        self._handle(events.Submitted(id=received.id, action=action, submitted_at=submitted_at), now)

    def _note_received(self, action_id: str, action: Action, message: str, submitted_at: float, now: float) -> None:
        self._entries.append(
            ActionReceived(id=action_id, header=action.to_header(), message=message, submitted_at=submitted_at, received_at=now)
        )

    def _refuse_unreadable(self, received: Received, problem: str, submitted_at: float, now: float) -> None:
        """End an action whose header cannot be understood, with all the ceremony of one that can."""
        self._note_received(received.id, Action(kind="unreadable"), received.message, submitted_at, now)
        refused = commands.Finish(
            id=received.id,
            status="rejected",
            reason=f"header {ACTION_HEADER}: {problem}",
            by_worker=False,
            started_at=None,
            queue_s=0.0,
            overhead_s=now - submitted_at,
            execution_s=0.0,
            cpu_s=0.0,
            dop=0,
        )
        self._apply(refused, now)

    def _take_report(self, report: Mapping[str, Any], now: float) -> None:
        sort = report["type"]
        if sort == "finished":
            finished = events.Finished(
                id=report["id"],
                attempt=report["attempt"],
                status=report["status"],
                reason=report.get("reason", ""),
                started_at=report.get("started_at"),
                execution_s=report.get("execution_s", 0.0),
                cpu_s=report.get("cpu_s", 0.0),
            )
            self._handle(finished, now)
        elif sort == "started":
            self._handle(events.Started(id=report["id"], attempt=report["attempt"], at=report["at"]), now)
        elif sort in ("joined", "beat"):
            self._take_beat(report["node"], now)
        elif sort == "unknown":
            self._answer_unknown(report["id"], report["attempt"], now)
        elif sort == "left":
            self._handle(events.NodeLost(name=report["name"], reason="its worker was stopped", left=True), now)

    def _take_beat(self, description: Mapping[str, Any], now: float) -> None:
        """Let a node join that is not known, or not in this incarnation; else count the beat."""
        name, incarnation = description["name"], str(description.get("incarnation", ""))
        known = name in self._core.state.nodes
        if not known or self._incarnations.get(name) != incarnation:
            self._incarnations[name] = incarnation
            self._descriptions[name] = {k: v for k, v in description.items() if k not in ("running", "environments")}
            for service in services_of(description):
                self._core.state.services.setdefault(service.name, service)
            self._handle(events.NodeJoined(node=node_spec(description)), now)
        # Beats that have piled up while nobody read them all tell of the past: one of them counts, the others are signs of life.
        if now - self._beat_at.get(name, float("-inf")) < (self._core.state.limits.beat_s or 0.0) / 2:
            self._count_beat(name, now)
            return
        self._beat_at[name] = now
        beat = events.NodeBeat(name=name, running=frozenset(description["running"]), environments=frozenset(description["environments"]))
        self._handle(beat, now)
        self._ask(name)
        self._sweep(name, description, now)

    def _count_beat(self, name: str, now: float) -> None:
        """Let a node live on, whatever it runs."""
        node = self._core.state.nodes.get(name)
        if node is not None:
            self._handle(events.NodeBeat(name=name, running=frozenset(node.running), environments=frozenset(node.environments)), now)

    def _ask(self, name: str) -> None:
        """Ask a node for actions that it was handed and does not run: a message may have been lost on either way.

        It tells once more how they ended, or that it does not know them. A node that does not answer is lost soon.
        """
        node = self._core.state.nodes.get(name)
        for action_id in node.running if node is not None else ():
            running = self._core.state.running[action_id]
            if running.unseen_beats == 1:
                self._transport.send_control(name, "tangram.tell", {"id": action_id, "attempt": running.grant.attempt})

    def _answer_unknown(self, action_id: str, attempt: int, now: float) -> None:
        """Send a grant again that has not arrived; give an action up that cannot be delivered."""
        running = self._core.state.running.get(action_id)
        if running is None or running.grant.attempt != attempt:
            return
        node = running.grant.node
        resent = self._resent[action_id] = self._resent.get(action_id, 0) + 1
        if running.started_at is None and resent <= MOST_RESENT:
            log.warning("node %s never got action %s; sending it again", node, action_id)
            self._transport.send_action(node, self._messages[action_id], self._grant_header(action_id, running.grant, running.granted_at))
            return
        reason = f"node {node} does not know how it ended" if running.started_at is not None else f"node {node} cannot take its message up"
        self._transport.store_end(action_id, self._messages[action_id], "lost", reason)
        self._handle(events.Finished(id=action_id, attempt=attempt, status="lost", reason=reason), now)

    def _sweep(self, name: str, description: Mapping[str, Any], now: float) -> None:
        """Have a node give up what it runs or holds and this scheduler does not know of.

        Such things are left over from a time in which the node was taken for lost. Two beats in a row must show
        them, since a beat and an order may cross.
        """
        orphans = [("tangram.stop", i) for i in description["running"] if i not in self._core.state.running]
        orphans += [("tangram.close_environment", e) for e in description["environments"] if e not in self._core.state.environments]
        seen = {key: self._orphan_beats.pop(key, 0) + 1 for key in (f"{name}/{orphan}" for _, orphan in orphans)}
        for key in [key for key in self._orphan_beats if key.startswith(f"{name}/")]:
            del self._orphan_beats[key]
        self._orphan_beats.update(seen)
        for task, orphan in orphans:
            if seen[f"{name}/{orphan}"] == 2:
                log.warning("node %s holds %s, which is not known here: %s", name, orphan, task)
                self._transport.send_control(name, task, {"id": orphan, "attempt": 0, "reason": "not known to the scheduler"})

    def _take_wish(self, body: Mapping[str, Any], now: float) -> None:
        cancel = body.get("cancel")
        if cancel is None:
            raise ValueError(f"no such wish: {sorted(body)}")
        ids = tuple(str(action_id) for action_id in cancel.get("ids", ()))
        self._handle(events.Cancelled(ids=ids, job=cancel.get("job"), trajectory=cancel.get("trajectory")), now)

    def _handle(self, event: events.Event, now: float) -> None:
        before, began = self._core.decisions, time.perf_counter()
        out = self._core.handle(event, now)
        if self._core.decisions != before:
            self._figures.decision_us.append((time.perf_counter() - began) * 1e6)
        for command in out:
            self._apply(command, now)

    def _show(self) -> None:
        state, figures = self._core.state, self._figures
        decision_us = sorted(figures.decision_us)
        self._transport.show(
            {
                "policy": state.policy.name,
                "epoch": self._epoch,
                "waiting": len(state.waiting),
                "running": len(state.running),
                "decisions": self._core.decisions,
                "resizes": figures.resizes,
                "restores": figures.restores,
                "decision_us_p50": percentile(decision_us, 50),
                "decision_us_p99": percentile(decision_us, 99),
            }
        )

    def _apply(self, command: commands.Command, now: float) -> None:
        match command:
            case commands.Start():
                self._start(command, now)
            case commands.Finish():
                self._finish(command, now)
            case commands.Resize():
                self._figures.resizes += 1
                arguments = {"id": command.id, "attempt": command.attempt, "core_ids": list(command.core_ids)}
                self._transport.send_control(command.node, "tangram.resize", arguments)
            case commands.Stop():
                arguments = {"id": command.id, "attempt": command.attempt, "reason": command.reason}
                self._transport.send_control(command.node, "tangram.stop", arguments)
            case commands.CloseEnvironment():
                arguments = {"id": command.id, "attempt": 0, "reason": command.reason}
                self._transport.send_control(command.node, "tangram.close_environment", arguments)
            case commands.Requeue():
                log.warning("action %s waits again: %s", command.id, command.reason)
                self._transport.disown(command.id, self._granted.pop(command.id))
                self._entries.append(ActionRequeued(id=command.id, reason=command.reason, at=now))
            case commands.NoteEnvironment():
                self._note_environment(command, now)
            case commands.NoteNode():
                self._note_node(command, now)

    def _note_node(self, command: commands.NoteNode, now: float) -> None:
        log.log(logging.WARNING if command.state == "lost" else logging.INFO, "node %s is %s", command.name, _because(command))
        description = self._descriptions.get(command.name, {})
        self._entries.append(NodeChanged(name=command.name, state=command.state, description=description, at=now, reason=command.reason))
        if command.state != "up" and command.name not in self._core.state.nodes:
            self._descriptions.pop(command.name, None)
            self._incarnations.pop(command.name, None)
            self._beat_at.pop(command.name, None)
            for key in [key for key in self._orphan_beats if key.startswith(f"{command.name}/")]:
                del self._orphan_beats[key]

    def _start(self, command: commands.Start, now: float) -> None:
        grant = command.grant
        self._figures.restores += grant.restore
        self._granted[command.id] = grant.attempt
        self._entries.append(
            ActionGranted(
                id=command.id,
                attempt=grant.attempt,
                node=grant.node,
                units=grant.units,
                core_ids=grant.core_ids,
                cell_ids=grant.cell_ids,
                granted_at=now,
            )
        )
        self._transport.send_action(grant.node, self._messages[command.id], self._grant_header(command.id, grant, now))

    def _grant_header(self, action_id: str, grant: Grant, granted_at: float) -> dict[str, Any]:
        """Return what a message for a node carries of its grant (`tangram.wire.WireGrant`)."""
        running = self._core.state.running.get(action_id)
        return {
            "node": grant.node,
            "attempt": grant.attempt,
            "epoch": self._epoch,
            "units": grant.units,
            "core_ids": list(grant.core_ids),
            "cell_ids": list(grant.cell_ids),
            "evict": list(grant.evict),
            "restore": grant.restore,
            "submitted_at": self._submitted_at[action_id],
            "received_at": running.waiting.received_at if running is not None else granted_at,
            "granted_at": granted_at,
        }

    def _finish(self, command: commands.Finish, now: float) -> None:
        message = self._messages.pop(command.id, "")
        self._submitted_at.pop(command.id, None)
        self._resent.pop(command.id, None)
        granted = self._granted.pop(command.id, None)
        self._ended[command.id] = None
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        self._entries.append(
            ActionEnded(
                id=command.id,
                status=command.status,
                reason=command.reason,
                started_at=command.started_at,
                ended_at=now,
                queue_s=command.queue_s,
                overhead_s=command.overhead_s,
                execution_s=command.execution_s,
                cpu_s=command.cpu_s,
                dop=command.dop,
                unit_s=command.unit_s,
            )
        )
        if not command.by_worker:
            if granted is not None:
                self._transport.disown(command.id, granted)
            self._transport.store_end(command.id, message, command.status, command.reason)

    def _note_environment(self, command: commands.NoteEnvironment, now: float) -> None:
        self._entries.append(
            EnvironmentChanged(
                id=command.id,
                state=command.state,
                node=command.node,
                job=command.job,
                trajectory=command.trajectory,
                memory_mb=command.memory_mb,
                pod_cores=len(command.pod_core_ids),
                at=now,
                reason=command.reason,
            )
        )


def _because(command: commands.NoteNode) -> str:
    return f"{command.state}: {command.reason}" if command.reason else command.state


def node_spec(description: Mapping[str, Any]) -> NodeSpec:
    """Return the node that a worker describes (`tangram.wire.WireNode`)."""
    return NodeSpec(
        name=str(description["name"]),
        pools=tuple(str(kind) for kind in description["kinds"]),
        cores=int(description["cores"]),
        memory_mb=int(description["memory_mb"]) or UNLIMITED,
        cells=int(description["cells"]),
        cell_memory_mb=int(description["cell_memory_mb"]) or UNLIMITED,
        labels=frozenset(str(label) for label in description["labels"]),
    )


def services_of(description: Mapping[str, Any]) -> list[ServiceSpec]:
    """Return the services that a worker offers."""
    return [
        ServiceSpec(
            name=name,
            cells=tuple(declared.get("cells", [1])),
            memory_mb=int(declared.get("memory_mb", 0)),
            restore_s=float(declared.get("restore_s", 0.0)),
            max_concurrency=int(declared.get("max_concurrency", 1)),
            instances_per_node=1,
            sizes=tuple(declared.get("cells", [1])),
        )
        for name, declared in description.get("services", {}).items()
    ]
