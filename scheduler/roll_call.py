"""Which nodes are there and what they really run: beats, and what follows from them.

A beat names what a node runs and holds. What the scheduler thinks it runs and it does not is asked for; what it holds
and the scheduler does not know of it is told to give up; and while the scheduler itself could not hear, nobody's
silence counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from scheduler import events
from scheduler.commands import Resize
from scheduler.core import Core
from scheduler.descriptions import node_spec, services_of
from scheduler.model import ServiceSpec
from scheduler.orders import Orders
from scheduler.transport import Transport

log = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.5
"""Longest time between two looks at deadlines, beats and leases."""

RETURN_S = 5.0
"""Time that nodes have for their first beat after the broker was away."""

MOST_RESENT = 2
"""Times that a grant is sent again to a node that says that it never got it."""


class RollCall:
    """Hears the nodes. `handle` takes an event at a time to the core and carries out what follows, `learn` a service."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        orders: Orders,
        handle: Callable[[events.Event, float], None],
        learn: Callable[[ServiceSpec], None],
        now: float,
    ) -> None:
        self._core = core
        self._transport = transport
        self._orders = orders
        self._handle = handle
        self._learn = learn
        self._incarnations: dict[str, str] = {}
        self._beat_at: dict[str, float] = {}
        self._orphan_beats: dict[str, int] = {}
        self._resent: dict[str, int] = {}
        self._looked_at = now
        self._lost_connections = 0
        self._excused_until = 0.0

    def resume(self, name: str, description: Mapping[str, Any], now: float) -> None:
        """Take a node for up that was so when the scheduler before this one stopped."""
        self._orders.descriptions[name] = description
        self._incarnations[name] = str(description.get("incarnation", ""))
        self._join(description, now)

    def _join(self, description: Mapping[str, Any], now: float) -> None:
        """Let a node join, with what it offers and no services file has declared."""
        for service in services_of(description):
            self._learn(service)
        self._handle(events.NodeJoined(node=node_spec(description)), now)

    def forget_the_gone(self) -> None:
        """Drop what was kept of nodes that are gone and of actions that have ended."""
        nodes, running = self._core.state.nodes, self._core.state.running
        for kept in (self._incarnations, self._beat_at, self._orders.descriptions):
            for name in [name for name in kept if name not in nodes]:
                del kept[name]
        for action_id in [action_id for action_id in self._resent if action_id not in running]:
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
            self._repeat_orders()
        self._looked_at = now

    def take_beat(self, description: Mapping[str, Any], now: float) -> None:
        """Let a node join that is not known, or not in this incarnation; else count the beat."""
        name, incarnation = description["name"], str(description.get("incarnation", ""))
        known = name in self._core.state.nodes
        if not known or self._incarnations.get(name) != incarnation:
            self._incarnations[name] = incarnation
            self._orders.descriptions[name] = {k: v for k, v in description.items() if k not in ("running", "environments")}
            self._join(description, now)
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

    def answer_unknown(self, action_id: str, attempt: int, now: float) -> None:
        """Send a grant again that has not arrived; give an action up that cannot be delivered."""
        running = self._core.state.running.get(action_id)
        if running is None or running.grant.attempt != attempt:
            return
        node = running.grant.node
        resent = self._resent[action_id] = self._resent.get(action_id, 0) + 1
        if running.started_at is None and resent <= MOST_RESENT:
            log.warning("node %s never got action %s; sending it again", node, action_id)
            self._transport.send_action(
                node, self._orders.messages[action_id], self._orders.grant_header(action_id, running.grant, running.granted_at)
            )
            return
        reason = f"node {node} does not know how it ended" if running.started_at is not None else f"node {node} cannot take its message up"
        self._transport.store_end(action_id, self._orders.messages[action_id], "lost", reason)
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

    def _repeat_orders(self) -> None:
        """Send again what may have been lost with a broker's connection; each is harmless when it comes twice."""
        for running in self._core.state.running.values():
            grant, action_id = running.grant, running.waiting.id
            if running.stopping:
                arguments = {"id": action_id, "attempt": grant.attempt, "reason": running.stopping}
                self._transport.send_control(grant.node, "tangram.stop", arguments)
            elif grant.core_ids and running.started_at is not None:
                held = Resize(id=action_id, node=grant.node, attempt=grant.attempt, core_ids=grant.core_ids, share=grant.share)
                self._orders.send_cores(held)
