"""Beats of nodes: which nodes are there and what they really run.

A beat names what a node runs and holds. The scheduler asks a node for the actions that it should run and does not, and has it give up
what the scheduler does not know. While the scheduler itself could not receive beats, no node's silence counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scheduler.core.core import Core
from scheduler.core.nodes import IDLENESS, SILENCE, idle, silent
from scheduler.live.command_executor import CommandExecutor
from scheduler.live.descriptions import node_spec, service_spec, services_of
from scheduler.live.entries import NodeChanged
from scheduler.live.instances import Instances, sensible
from scheduler.live.transport import Transport
from scheduler.model import ServiceSpec, events

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
"""Longest time between two looks at deadlines, beats and leases."""

RETURN_S = 5.0
"""Time that nodes have for their first beat after the broker was away."""

_OF_NOW = ("running", "environments", "instances")
"""Parts of a description that are only so at the moment."""

RESTORE_UNSEEN_S = 180.0
"""How long cells are kept for a restore that the node's beats do not show. Its worker first waits for the calls of the instances that it
evicts, a minute each. After this time the control task, or the report of its end, counts as lost."""

_UNDER_WAY = ("starting", "restoring", "evicting")

MOST_RESENT = 2
"""Times that a grant is sent again to a node that says that it never got it."""


class Heartbeats:
    """Receives the beats of the nodes. `handle` takes an event at a time to the core and carries out what follows."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        orders: CommandExecutor,
        handle: Callable[[events.Event, float], None],
        now: float,
    ) -> None:
        self._core = core
        self._transport = transport
        self._executor = orders
        self._handle = handle
        self.instances = Instances(handle, orders.note)
        self._incarnations: dict[str, str] = {}
        self._unheard: dict[str, None] = {}
        self._beat_at: dict[str, float] = {}
        self._orphan_beats: dict[str, int] = {}
        self._resent: dict[str, int] = {}
        self._looked_at = now
        self._lost_connections = 0
        self._excused_until = 0.0

    def resume(self, name: str, description: Mapping[str, Any], now: float) -> None:
        """Take a node for up that was so when the scheduler before this one stopped."""
        self._executor.descriptions[name] = description
        self._incarnations[name] = str(description.get("incarnation", ""))
        self._unheard[name] = None
        self._join(description, now, resumed=True)

    def _join(self, description: Mapping[str, Any], now: float, *, resumed: bool = False) -> None:
        """Let a node join, with the services as it describes them."""
        for service in services_of(description):
            self._learn_from(str(description["name"]), service, now)
        self._handle(events.NodeJoined(node=node_spec(description), resumed=resumed), now)

    def _learn_from(self, name: str, service: ServiceSpec, now: float) -> None:
        """Take a service up as a node declares it, and say so where another one does otherwise: here it is only one thing."""
        for other, description in self._executor.descriptions.items():
            declared = description.get("services", {}).get(service.name)
            if other != name and other in self._core.state.nodes and declared and service_spec(service.name, declared) != service:
                log.warning(
                    "node %s declares service %s otherwise than node %s does; the latest counts for both", name, service.name, other
                )
        if self._core.state.services.get(service.name) != service:
            self._handle(events.ServiceDescribed(service=service), now)

    def forget_the_gone(self) -> None:
        """Drop what was kept of nodes that are gone and of actions that have ended."""
        nodes, running, waiting = self._core.state.nodes, self._core.state.running, self._core.state.waiting
        for kept in (self._incarnations, self._beat_at, self._executor.descriptions, self._unheard):
            for name in [name for name in kept if name not in nodes]:
                del kept[name]
        self.instances.forget([name for name in self.instances.nodes() if name not in nodes])
        for action_id in [action_id for action_id in self._resent if action_id not in running and action_id not in waiting]:
            del self._resent[action_id]
        for key in [key for key in self._orphan_beats if key.partition("/")[0] not in nodes]:
            del self._orphan_beats[key]

    def excuse(self, now: float) -> None:
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
            self.resend_commands()
        self._looked_at = now

    def lose_the_silent(self, now: float) -> None:
        """Give up the nodes that have missed too many beats."""
        if self._core.state.limits.beat_s is not None:
            for name in silent(self._core.state, self._core.state.limits.beat_s, now):
                self.lose(name, SILENCE, now)

    def lose(self, name: str, reason: str, now: float, *, left: bool = False) -> None:
        """Give a node up, if it is known. What it has stored the result of has ended, though no report of that came."""
        node = self._core.state.nodes.get(name)
        if node is None:
            return
        self._handle(events.NodeLost(name=name, reason=reason, left=left, ended=self._stored_ends(node.running)), now)

    def _stored_ends(self, action_ids: Iterable[str]) -> tuple[events.StoredEnd, ...]:
        """Return the ends of those of these running actions whose results are stored: trainers know them.

        An environment that was just opened does not count: nobody can have used it, and it may as well be opened elsewhere.
        """
        kinds = {action_id: self._core.state.running[action_id].waiting.action.kind for action_id in action_ids}
        ends = self._transport.stored_ends(kinds)
        return tuple(end for end in ends if kinds[end.id] != "cpu.open" or end.status != "succeeded")

    def take_beat(self, description: Mapping[str, Any], now: float) -> None:
        """Let a node join that is not known, or not in this incarnation; else count the beat."""
        name, incarnation = description["name"], str(description.get("incarnation", ""))
        said = sensible(name, description.get("instances", ()))
        known = name in self._core.state.nodes
        if not known or self._incarnations.get(name) != incarnation:
            self.lose(name, "its worker was restarted", now)
            self._incarnations[name] = incarnation
            self._unheard.pop(name, None)
            self._executor.descriptions[name] = {k: v for k, v in description.items() if k not in _OF_NOW}
            self._join(description, now)
            self.instances.joined(name, said, now)
        elif description.get("services") != self._executor.descriptions[name].get("services"):
            self._describe_anew(name, description, now)
        # Beats that have piled up while nobody read them all tell of the past: one of them counts, the others are signs of life.
        if now - self._beat_at.get(name, float("-inf")) < (self._core.state.limits.beat_s or 0.0) / 2:
            self._count_beat(name, now)
            return
        self._beat_at[name] = now
        beat = events.NodeBeat(name=name, running=frozenset(description["running"]), environments=frozenset(description["environments"]))
        if idle(self._core.state, beat):
            self.lose(name, IDLENESS, now)
        else:
            self._handle(beat, now)
        self._ask(name)
        self._sweep(name, description, now)
        if name in self._unheard:
            self.instances.resumed(name, said, now)
        self.instances.beat(name, said, now)
        self._look_at_restores(name, said, now)
        if name in self._unheard:
            del self._unheard[name]
            self._declare(name, now)

    def _look_at_restores(self, name: str, said: Iterable[Mapping[str, Any]], now: float) -> None:
        """End restores of which the core waits to hear, and whose end must have passed it by."""
        group = self._core.pools.gpu.groups.get(name)
        states = {(one["service"], tuple(sorted(one["cell_ids"]))): one["state"] for one in said}
        for instance in [one for one in group.instances if one.restoring] if group is not None else ():
            state = states.get((instance.service, instance.cell_ids))
            lost = state not in _UNDER_WAY and now - instance.since > RESTORE_UNSEEN_S
            if state != "resident" and not lost:
                continue
            if lost:
                log.warning("node %s does not bring %s onto cells %s; its cells are free again", name, instance.service, instance.cell_ids)
            ended = events.ServiceChanged(
                node=name,
                service=instance.service,
                cell_ids=instance.cell_ids,
                state="resident" if state == "resident" else "failed",
                reason="" if state == "resident" else "its node does not bring it",
            )
            self._handle(ended, now)

    def _declare(self, name: str, now: float) -> None:
        """Tell the core which services a node declares, now that it has said what there is on its cells."""
        services = self._executor.descriptions[name].get("services")
        if services is not None and name in self._core.state.nodes:
            self._handle(events.ServicesDeclared(node=name, services=frozenset(services)), now)

    def _describe_anew(self, name: str, description: Mapping[str, Any], now: float) -> None:
        """Take up the services of a node that has read its file again or measured what one needs: the latest description of each counts."""
        before = self._executor.descriptions[name]
        known, declared = before.get("services", {}), description.get("services", {})
        self._executor.descriptions[name] = {**before, "services": declared}
        for service in services_of(description):
            if known.get(service.name) != declared[service.name]:
                self._learn_from(name, service, now)
        log.warning("node %s describes its services anew: %s", name, ", ".join(declared) or "none")
        if name not in self._unheard:  # else that follows when it has said what is on its cells
            self._declare(name, now)
        self._executor.note(NodeChanged(name=name, state="up", description=self._executor.descriptions[name], at=now))

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

    def answer_unknown(self, action_id: str, attempt: int, now: float) -> None:
        """Send a grant again that has not arrived; give an action up that cannot be delivered, unless its result is stored."""
        running = self._core.state.running.get(action_id)
        if running is None or running.grant.attempt != attempt:
            return
        for end in self._stored_ends([action_id]):
            self._handle(end.finished(attempt), now)
            return
        node = running.grant.node
        resent = self._resent[action_id] = self._resent.get(action_id, 0) + 1
        if running.started_at is None and resent <= MOST_RESENT:
            log.warning("node %s never got action %s; it is sent again", node, action_id)
            self._handle(events.NeverArrived(id=action_id, attempt=attempt), now)
            if action_id not in self._core.state.running or self._core.state.running[action_id].grant.attempt != attempt:
                return  # it waits for its turn under its quotas, or has been granted anew
            self._transport.send_action(
                node, self._executor.messages[action_id], self._executor.grant_header(action_id, running.grant, running.granted_at)
            )
            return
        reason = f"node {node} does not know how it ended" if running.started_at is not None else f"node {node} cannot take its message up"
        self._handle(events.Finished(id=action_id, attempt=attempt, status="lost", reason=reason, told_by="scheduler"), now)

    def _sweep(self, name: str, description: Mapping[str, Any], now: float) -> None:
        """Have a node give up what it runs or holds and this scheduler does not know of.

        Such things are left over from a time in which the node was taken for lost. Two beats in a row must show
        them, since a beat and a control task may cross.
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

    def resend_commands(self) -> None:
        """Send again what may have been lost with a broker's connection; each is harmless when it comes twice.

        Grants are not sent again here. A node whose beats do not show one is asked for it, and what it does not know is granted anew
        (`NeverArrived`).
        """
        for running in self._core.state.running.values():
            grant, action_id = running.grant, running.waiting.id
            if running.stopping:
                arguments = {"id": action_id, "attempt": grant.attempt, "reason": running.stopping}
                self._transport.send_control(grant.node, "tangram.stop", arguments)
            elif grant.core_ids or grant.background:
                self._executor.regrant(grant.node, action_id, grant)
        actions = [running.waiting.action for running in self._core.state.running.values()]
        closed_by_action = {action.environment for action in actions if action.kind == "cpu.close"}
        for environment in self._core.state.environments.values():
            if environment.state == "closing" and environment.node is not None and environment.id not in closed_by_action:
                arguments = {"id": environment.id, "attempt": 0, "reason": "it is being closed"}
                self._transport.send_control(environment.node, "tangram.close_environment", arguments)
