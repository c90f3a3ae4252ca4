"""Beats of nodes: they show which nodes are up and which actions they really run.

This module finds the nodes that are silent, idle or restarted, and sends `NodeSilent`, `NodeLost` and `WorkerReplaced` to the core.

| a node | counts as |
|---|---|
| has missed three beats, or has taken up no grant in as many | silent: what may run elsewhere is given up, all else waits for the node |
| beats `leaving`, since its worker hands over | silent, though all runs on; the worker is told that no more comes (`tangram.let_go`) |
| has not beaten, or has taken up no grant, for `Limits.node_lost_s` | lost |
| beats as another incarnation, offers the same and has adopted environments | up: these stand, and all else of it is lost |
| beats as another incarnation otherwise, or says that it leaves | lost at once |
| beats again as the same incarnation | up: what beats show undone is asked for again, as always |

A beat names the actions and environments of a node. An open environment that two beats in a row do not name is lost: the first may have
been written before the environment was open. The scheduler asks a node for missing actions. It repeats the stops, closes and
changes of cores that a beat shows undone. Silence of a node does not count while the scheduler itself cannot receive beats: both times
begin anew once it can. They also begin with a scheduler that takes over.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from scheduler.core.core import Core
from scheduler.core.nodes import HANDS_OVER, RESTARTED, may_leave
from scheduler.live.command_executor import CommandExecutor
from scheduler.live.descriptions import node_spec, service_spec, services_of
from scheduler.live.entries import NodeChanged
from scheduler.live.incarnations import Incarnations
from scheduler.live.instances import Instances, sensible
from scheduler.live.successors import actions_that_go_on, adopted_environments
from scheduler.live.transport import Transport
from scheduler.model import ServiceSpec, events
from scheduler.model.commands import Stop
from scheduler.model.lifecycle import MISSED_BEATS
from scheduler.model.state import Node
from scheduler.quotas.answers import only_calls

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
"""Longest time between two looks at deadlines, beats and leases."""

RETURN_S = 5.0
"""Time that nodes have for their first beat after the broker was away."""

_OF_NOW = ("running", "environments", "lost", "instances", "busy_cores", "held_cores", "allowed", "leaving")
"""Parts of a description that hold only for the moment."""

Asked = tuple[str, str]
"""A control task, and the action or environment that it is about."""

MOST_RESENT = 2
"""Times that a grant is sent again to a node that reports it as unknown."""

SILENCE = f"{MISSED_BEATS} beats missed"
IDLENESS = "it beats but does not run what it was handed"


class Heartbeats:
    """Receives the beats of the nodes. `handle` takes an event to the core and carries out its commands."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        executor: CommandExecutor,
        handle: Callable[[events.Event, float], None],
        now: float,
    ) -> None:
        self._core = core
        self._transport = transport
        self._executor = executor
        self._handle = handle
        self.instances = Instances(handle, executor.note)
        self.busy_cores: dict[str, float] = {}
        """The mean number of busy cores of a node between its last two beats, if its worker measures it."""
        self._incarnations = Incarnations()
        self._unheard: dict[str, None] = {}
        self._beat_at: dict[str, float] = {}
        self._due_for: dict[str, dict[Asked, int]] = {}
        """How many beats in a row have shown undone what a node is asked for, by node."""
        self._resent: dict[str, tuple[int, float]] = {}
        """How often an action was sent again to a node that does not know it, and when last."""
        self._looked_at = now
        self._lost_connections, self._whole_since = 0, now
        self._excused_until = 0.0

    def resume(self, name: str, description: Mapping[str, Any], now: float) -> None:
        """Take over a node that was up when the scheduler before this one stopped."""
        self._executor.descriptions[name] = description
        self._incarnations.follow(name, str(description.get("incarnation", "")), now)
        self._unheard[name] = None
        self._join(description, now, resumed=True)

    def _join(self, description: Mapping[str, Any], now: float, *, resumed: bool = False) -> None:
        """Let a node join, with the services that it describes."""
        for service in services_of(description):
            self._learn_from(str(description["name"]), service, now)
        self._handle(events.NodeJoined(node=node_spec(description), resumed=resumed), now)

    def _learn_from(self, name: str, service: ServiceSpec, now: float) -> None:
        """Take in a service as a node declares it.

        Log a warning if another node declares it in another way: the core has one description.
        """
        for other, description in self._executor.descriptions.items():
            declared = description.get("services", {}).get(service.name)
            if other != name and other in self._core.state.nodes and declared and service_spec(service.name, declared) != service:
                log.warning(
                    "node %s declares service %s otherwise than node %s does; the latest counts for both", name, service.name, other
                )
        if self._core.state.services.get(service.name) != service:
            self._handle(events.ServiceDescribed(service=service), now)

    def forget_the_gone(self) -> None:
        """Drop the entries of gone nodes and ended actions."""
        nodes, running, waiting = self._core.state.nodes, self._core.state.running, self._core.state.waiting
        for kept in (self._incarnations.current, self._beat_at, self.busy_cores, self._executor.descriptions, self._unheard, self._due_for):
            for name in [name for name in kept if name not in nodes]:
                del kept[name]
        self.instances.forget([name for name in self.instances.nodes() if name not in nodes])
        for action_id in [action_id for action_id in self._resent if action_id not in running and action_id not in waiting]:
            del self._resent[action_id]

    def excuse(self, now: float) -> None:
        """Count a beat for every node while this scheduler could not hear beats."""
        if self._transport.lost_connections != self._lost_connections:
            self._lost_connections, self._whole_since = self._transport.lost_connections, now
            self._excused_until = float("inf")
        stalled = abs(now - self._looked_at) > HOUSEKEEPING_S + (self._core.state.limits.beat_s or 0.0)
        if not self._transport.caught_up or stalled or now < self._excused_until:
            for name in list(self._core.state.nodes):
                self._count_beat(name, now, excused=True)
        if self._excused_until == float("inf") and self._transport.caught_up:
            self._excused_until = now + RETURN_S
            self.resend_commands()
        self._looked_at = now

    def judge_silence(self, now: float) -> None:
        """Have the nodes that have missed too many beats, or take nothing up, count as silent; give up those that do so for too long."""
        state, beat_s = self._core.state, self._core.state.limits.beat_s
        if beat_s is None:
            return
        lost_s = max(state.limits.node_lost_s, MISSED_BEATS * beat_s)
        for node in list(state.nodes.values()):
            if now - node.last_beat > MISSED_BEATS * beat_s:
                lasted_s, silence, loss = now - node.last_beat, SILENCE, f"no beat for {lost_s:g} s"
            elif node.idle_beats > MISSED_BEATS:
                lasted_s, silence, loss = node.idle_beats * beat_s, IDLENESS, IDLENESS
            else:
                continue
            if lasted_s > lost_s:
                self.lose(node.spec.name, loss, now)
            elif not node.silent:
                ended = self._give_up([i for i in node.running if may_leave(state, state.running[i])])
                if ended is not None:
                    self._handle(events.NodeSilent(name=node.spec.name, reason=silence, ended=ended), now)

    def _let_go(self, node: Node, description: Mapping[str, Any], now: float) -> None:
        """Grant nothing more to a node whose worker hands over, and say so behind all that was granted before."""
        if not node.silent:
            self._handle(events.NodeSilent(name=node.spec.name, reason=HANDS_OVER, hands_over=True), now)
        self._transport.send_control(node.spec.name, "tangram.let_go", {"incarnation": self._incarnations.current[node.spec.name]})
        self._handle(replace(self._beat_of(description), excused=True), now)
        self._sweep(node.spec.name, description)

    def lose(self, name: str, reason: str, now: float, *, left: bool = False, lost: tuple[events.Loss, ...] = ()) -> bool:
        """Give a node up, if it is known; return whether it is unknown now.

        Actions with a stored result have ended, even without a report. While the store does not say which they are, the node stays.
        """
        node = self._core.state.nodes.get(name)
        if node is None:
            return True
        ended = self._give_up(node.running)
        if ended is not None:
            self._handle(events.NodeLost(name=name, reason=reason, left=left, ended=ended, lost=lost), now)
        return ended is not None

    def leave(self, name: str, incarnation: str, now: float) -> None:
        """Give a node up whose worker was stopped. Older workers do not name their incarnation."""
        if incarnation in ("", self._incarnations.current.get(name)):
            self.lose(name, "its worker was stopped", now, left=True)
        self._incarnations.end(name, incarnation, now)

    def _give_up(self, action_ids: Iterable[str]) -> tuple[events.StoredEnd, ...] | None:
        """Let no more results of running actions count; return those that are stored. None if the store does not say."""
        running = {action_id: self._core.state.running[action_id] for action_id in action_ids}
        kinds = {action_id: one.waiting.action.kind for action_id, one in running.items()}
        ended = self._transport.stored_ends(kinds, {action_id: one.grant.attempt for action_id, one in running.items()})
        return None if ended is None else tuple(ended)

    def take_beat(self, description: Mapping[str, Any], now: float) -> None:
        """Let a node join if it, or its incarnation, is unknown. Otherwise count the beat."""
        name, incarnation = description["name"], str(description.get("incarnation", ""))
        said = sensible(name, description.get("instances", ()))
        known, is_other = name in self._core.state.nodes, self._incarnations.current.get(name) != incarnation
        if self._incarnations.is_over(name, incarnation, now):
            return
        if description.get("leaving") is True:
            if known and not is_other:
                self._let_go(self._core.state.nodes[name], description, now)
            return
        if known and is_other and (adopted := adopted_environments(self._core.state, description)):
            if not self._replace_worker(name, description, adopted, now):
                return  # a later beat says so again
        elif not known or is_other:
            if not self.lose(name, RESTARTED, now, lost=self._losses(description)):
                return  # a later beat says so again
            self._incarnations.follow(name, incarnation, now)
            self._unheard.pop(name, None)
            self._executor.descriptions[name] = {k: v for k, v in description.items() if k not in _OF_NOW}
            self._join(description, now)
            self.instances.joined(name, said, now)
        elif description.get("services") != self._executor.descriptions[name].get("services"):
            self._describe_anew(name, description, now)
        # Beats that have piled up unread are all old. One of them counts in full, and the rest only as signs of life.
        if abs(now - self._beat_at.get(name, float("-inf"))) < (self._core.state.limits.beat_s or 0.0) / 2:
            self._count_beat(name, now)
            return
        self._beat_at[name] = now
        if isinstance(busy := description.get("busy_cores"), int | float) and math.isfinite(busy):
            self.busy_cores[name] = float(busy)
        self._handle(self._beat_of(description), now)
        self._ask(name)
        self._sweep(name, description)
        if name in self._unheard:
            self.instances.resumed(name, said, now)
        self.instances.beat(name, said, now)
        if (cells := self._core.pools.gpu.groups.get(name)) is not None:
            self.instances.look_at_restores(name, cells.instances, said, now)
        if name in self._unheard:
            del self._unheard[name]
            self._declare(name, now)

    def _beat_of(self, description: Mapping[str, Any]) -> events.NodeBeat:
        standing, lost = frozenset(description["environments"]), self._losses(description)
        allowed = tuple(
            events.Allowed(environment=environment_id, allowance_mb=allowance_mb, serial=serial if epoch == self._executor.epoch else 0)
            for environment_id, (allowance_mb, epoch, serial) in description.get("allowed", {}).items()
        )
        running = frozenset(description["running"])
        return events.NodeBeat(name=description["name"], running=running, environments=standing, lost=lost, allowed=allowed)

    def _losses(self, description: Mapping[str, Any]) -> tuple[events.Loss, ...]:
        """Return why environments that are believed to stand have ended or were not adopted, as their node says."""
        return tuple(
            events.Loss(id=environment_id, reason=reason, cause=cause)
            for environment_id, reason, cause in description.get("lost", ())
            if environment_id in self._core.state.environments and environment_id not in description["environments"]
        )

    def _replace_worker(self, name: str, description: Mapping[str, Any], adopted: frozenset[str], now: float) -> bool:
        """Go on with a node whose worker is another one. Return False while the store does not say what has ended."""
        whole_since = self._whole_since if self._transport.lost_connections == self._lost_connections else now
        running = actions_that_go_on(self._core.state, self._transport, description, adopted, whole_since)
        ended = None if running is None else self._give_up(set(self._core.state.nodes[name].running) - running)
        if running is None or ended is None:
            return False
        counts = (len(adopted), len(running))
        log.warning("another worker goes on with node %s, with %d of its environments and %d actions", name, *counts)
        self._incarnations.follow(name, str(description.get("incarnation", "")), now)
        self._executor.descriptions[name] = {k: v for k, v in description.items() if k not in _OF_NOW}
        lost = self._losses(description)
        self._handle(events.WorkerReplaced(name=name, environments=adopted, ended=ended, lost=lost, running=running), now)
        self._executor.note(NodeChanged(name=name, state="up", description=self._executor.descriptions[name], at=now))
        return True

    def _declare(self, name: str, now: float) -> None:
        """Tell the core the services of a node, now that the node has reported its instances."""
        services = self._executor.descriptions[name].get("services")
        if services is not None and name in self._core.state.nodes:
            self._handle(events.ServicesDeclared(node=name, services=frozenset(services)), now)

    def _describe_anew(self, name: str, description: Mapping[str, Any], now: float) -> None:
        """Take in the changed services of a node.

        It has read its file again, or measured a service. The latest description of each service counts.
        """
        before = self._executor.descriptions[name]
        known, declared = before.get("services", {}), description.get("services", {})
        self._executor.descriptions[name] = {**before, "services": declared}
        for service in services_of(description):
            if known.get(service.name) != declared[service.name]:
                self._learn_from(name, service, now)
        log.warning("node %s describes its services anew: %s", name, ", ".join(declared) or "none")
        if name not in self._unheard:  # else this follows the report of its instances
            self._declare(name, now)
        self._executor.note(NodeChanged(name=name, state="up", description=self._executor.descriptions[name], at=now))

    def _count_beat(self, name: str, now: float, *, excused: bool = False) -> None:
        """Count a beat of a node with all its actions. It says nothing of environments."""
        node = self._core.state.nodes.get(name)
        if node is not None:
            self._handle(events.NodeBeat(name=name, running=frozenset(node.running), environments=None, excused=excused), now)

    def _ask(self, name: str) -> None:
        """Ask a node for granted actions that it does not run. A message may have been lost in either direction.

        The node reports their ends again, or that it does not know them. A node that takes up no grant meanwhile is soon silent.
        """
        node = self._core.state.nodes.get(name)
        for action_id in node.running if node is not None else ():
            running = self._core.state.running[action_id]
            if running.unseen_beats % MISSED_BEATS == 1:
                self._transport.send_control(name, "tangram.tell", {"id": action_id, "attempt": running.grant.attempt})

    def answer_unknown(self, action_id: str, attempt: int, now: float, said_at: float = math.inf) -> None:
        """Send a grant again that has not arrived. Give up an action that cannot be delivered, unless its result is stored.

        A report may come several times. Within a beat, the grant that was sent again is still under way.
        """
        running = self._core.state.running.get(action_id)
        if running is None or running.grant.attempt != attempt:
            return
        if running.started_at is not None and (running.unseen_beats == 0 or said_at < running.started_at):
            return  # the node said so before the grant arrived: its last beat shows the action, or it has started it since
        node, kinds = running.grant.node, {action_id: running.waiting.action.kind}
        resent, last = self._resent.get(action_id, (0, float("-inf")))
        under_way = now - last < (self._core.state.limits.beat_s or 0.0)
        again = running.started_at is None and resent < MOST_RESENT
        stored = self._transport.stored_ends(kinds, {} if under_way or again else {action_id: attempt})
        if stored:
            self._handle(stored[0].finished(attempt), now)
        if stored or stored is None or under_way:
            return  # if it has not ended, the node is asked again
        self._resent[action_id] = (resent + 1, now)
        if again and only_calls(running.waiting.action) and not self._transport.withdraw(action_id, attempt):
            return  # a worker has claimed it since, or has died with it: granted anew now, its request might be made twice
        if again:
            log.warning("node %s never got action %s; it is sent again", node, action_id)
            self._handle(events.NeverArrived(id=action_id, attempt=attempt), now)
            if action_id not in self._core.state.running or self._core.state.running[action_id].grant.attempt != attempt:
                return  # it waits for its quotas, or has been granted anew
            self._transport.send_action(
                node, self._executor.messages[action_id], self._executor.grant_header(action_id, running.grant, running.granted_at)
            )
            return
        reason = f"node {node} does not know how it ended" if running.started_at is not None else f"node {node} cannot take its message up"
        unknown = events.Finished(id=action_id, attempt=attempt, status="lost", reason=reason, told_by="scheduler", cause="end_unknown")
        self._handle(unknown, now)

    def _sweep(self, name: str, description: Mapping[str, Any]) -> None:
        """Ask a node again for what it should have done, by the core's books, and has not done, by its beats.

        Two beats in a row must show it, since a beat and a control task may cross. A control task may be lost, so the node is asked
        again after 4, 8, 16 beats and so on. A node that closes slowly would fill its threads otherwise.
        """
        node = self._core.state.nodes.get(name)
        if node is None:
            return
        due = self._due(node, description)
        before = self._due_for.get(name, {})
        self._due_for[name] = {each: before.get(each, 0) + 1 for each in due}
        for (task, id_), beats in self._due_for[name].items():
            if beats > 1 and beats.bit_count() == 1:
                log.warning("the beats of node %s show %s as it should not be; again: %s", name, id_, task)
                due[task, id_]()

    def _due(self, node: Node, description: Mapping[str, Any]) -> dict[Asked, Callable[[], None]]:
        """Return what a beat shows undone, and how to ask for it.

        What the node should not have at all is left over from a time in which it counted as lost. It may have ended since, wait again,
        or be on another node by now.
        """
        name, running = node.spec.name, self._core.state.running
        undone = {
            "tangram.stop": description["running"],
            "tangram.close_environment": description["environments"],
            "tangram.regrant": [
                action_id
                for action_id, core_ids in description.get("held_cores", {}).items()
                if action_id in running and tuple(core_ids) != running[action_id].grant.core_ids
            ],
        }
        due = {asked: ask for asked, ask in self._asked_of(node) if asked[1] in undone[asked[0]]}
        strange = [("tangram.stop", i) for i in description["running"] if i not in node.running]
        # One that waits for its open may have been made here by an earlier try, and may be opened here in a moment.
        others = [e for e in description["environments"] if e not in node.environments]
        known = self._core.state.environments
        strange += [("tangram.close_environment", e) for e in others if e not in known or known[e].state != "waiting"]
        for task, id_ in strange:
            arguments = {"id": id_, "attempt": 0, "reason": f"node {name} should not hold it any more"}
            due[task, id_] = partial(self._transport.send_control, name, task, arguments)
        return due

    def _asked_of(self, node: Node) -> Iterator[tuple[Asked, Callable[[], None]]]:
        """Return what a node is asked for besides its grants, and how to ask for it. Each is harmless when it comes twice."""
        closed_by_action = set[str | None]()
        for action_id in node.running:
            running = self._core.state.running[action_id]
            grant, action = running.grant, running.waiting.action
            if action.kind == "cpu.close":
                closed_by_action.add(action.environment)
            if running.stopping:
                stop = Stop(id=action_id, node=grant.node, attempt=grant.attempt, reason=running.stopping, cause=running.stop_cause)
                yield ("tangram.stop", action_id), partial(self._executor.stop, stop)
            elif grant.core_ids or grant.background:
                yield ("tangram.regrant", action_id), partial(self._executor.regrant, grant.node, action_id, grant)
        for environment_id in node.environments:
            if self._core.state.environments[environment_id].state == "closing" and environment_id not in closed_by_action:
                task, arguments = "tangram.close_environment", {"id": environment_id, "attempt": 0, "reason": "it is being closed"}
                yield (task, environment_id), partial(self._transport.send_control, node.spec.name, task, arguments)

    def resend_commands(self) -> None:
        """Send commands again that may have been lost with a broker's connection.

        Grants are not sent again here. If a node's beats do not show a granted action, the node is asked for it. To a node that does
        not know it, `answer_unknown` sends the same grant again; an action that only calls an API is granted anew (`NeverArrived`).
        """
        for node in self._core.state.nodes.values():
            for _, ask in self._asked_of(node):
                ask()
