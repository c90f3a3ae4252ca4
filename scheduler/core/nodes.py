"""Nodes come, beat, leave and are lost; the life cycle is in `scheduler/model/lifecycle.py`.

A node is lost when it misses three beats, when it says that it restarted, and also when it beats but never takes
up what it was handed: a worker whose consumer hangs looks alive from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler.core.ends import Ends
from scheduler.core.environments import Environments
from scheduler.core.pools import Pools
from scheduler.model import NodeSpec, Running, Waiting, events
from scheduler.model.commands import Command, NoteNode, Requeue
from scheduler.model.lifecycle import MISSED_BEATS, MOST_TRIES
from scheduler.model.state import Node, State

SILENCE = f"{MISSED_BEATS} beats missed"
IDLENESS = "it beats but does not run what it was handed"


def silent(state: State, beat_s: float, now: float) -> list[str]:
    """Return the names of the nodes whose last beat is too old."""
    return [node.spec.name for node in state.nodes.values() if now - node.last_beat > MISSED_BEATS * beat_s]


def idle(state: State, beat: events.NodeBeat) -> bool:
    """Return whether a node has by now beaten too often without running what it was handed."""
    node = state.nodes.get(beat.name)
    missing = [action_id for action_id in node.running if action_id not in beat.running] if node is not None else ()
    return any(state.running[action_id].unseen_beats >= MISSED_BEATS for action_id in missing)


class Nodes:
    """Keeps the nodes, and decides what becomes of the actions of a lost one."""

    def __init__(
        self,
        state: State,
        pools: Pools,
        environments: Environments,
        ends: Ends,
        enqueue: Callable[[Waiting, float], None],
        out: list[Command],
    ) -> None:
        self._state = state
        self._pools = pools
        self._out = out
        self._environments = environments
        self._ends = ends
        self._enqueue = enqueue

    def joined(self, spec: NodeSpec, now: float) -> None:
        """Take in a node; one that is up already has restarted, and what it ran is gone."""
        state = self._state
        if spec.name in state.nodes:
            self.lost(spec.name, "its worker was restarted", now, left=False)
        node = state.nodes[spec.name] = Node(spec, spec.memory_mb, now)
        state.offer(spec, 1)
        self._out.append(NoteNode(name=spec.name, state="up"))
        self._pools.joined(node)
        self._environments.joined(spec)

    def beat(self, event: events.NodeBeat, now: float) -> None:
        """Note that a node lives, and count the beats in which it does not run what it was handed."""
        node = self._state.nodes.get(event.name)
        if node is None:
            return
        if idle(self._state, event):
            self.lost(event.name, IDLENESS, now, left=False)
            return
        node.last_beat = now
        for action_id in node.running:
            running = self._state.running[action_id]
            running.unseen_beats = 0 if action_id in event.running else running.unseen_beats + 1
        self._forget_closed(node, event, now)

    def _forget_closed(self, node: Node, event: events.NodeBeat, now: float) -> None:
        """Take back the room of environments that the node has no more, as nobody waits for their closing or they ended there."""
        environments = [self._state.environments[e] for e in node.environments if e not in event.environments]
        for environment in environments:
            if environment.state == "closing" and not environment.actions:
                self._environments.closed(environment, environment.close_requested or "closed by the system", now)
            elif environment.state == "open":
                self._environments.gone(environment, f"it ended on node {node.spec.name}", now)

    def miss(self, beat_s: float, now: float) -> None:
        """Lose the nodes whose last beat is too old."""
        for name in silent(self._state, beat_s, now):
            self.lost(name, SILENCE, now, left=False)

    def lost(self, name: str, reason: str, now: float, *, left: bool, ended: Sequence[events.StoredEnd] = ()) -> None:
        """Forget a node: its environments are lost, its actions wait again or are lost too, but for those that have `ended`."""
        state = self._state
        node = state.nodes.pop(name, None)
        if node is None:
            return
        state.offer(node.spec, -1)
        self._out.append(NoteNode(name=name, state="left" if left else "lost", reason=reason))
        gone = [state.environments[environment_id] for environment_id in node.environments]
        ends = {stored.id: stored for stored in ended}
        for action_id in list(node.running):
            running, stored = state.running[action_id], ends.get(action_id)
            if stored is not None:
                self._end(running, stored, now)
            else:
                self.lose(running, f"node {name} was lost: {reason}", now)
        for environment in gone:
            if environment.state in ("open", "closing"):
                environment.lost = True
                self._environments.forget(environment, f"node {name} was lost: {reason}", now)
        self._pools.gone(node)
        self._environments.node_gone(node.spec)

    def _end(self, running: Running, stored: events.StoredEnd, now: float) -> None:
        """End an action of a node that is gone as its result says; nothing is learned of it, as figures are missing."""
        self._ends.release(running, now)
        self._ends.note_end(running, stored.status, stored.reason, now, finished=stored.finished(running.grant.attempt))
        environment = self._state.environments.get(running.waiting.action.environment or "")
        if environment is not None and running.waiting.action.kind == "cpu.open":
            self._environments.not_opened(environment, stored.reason, now)
        elif environment is not None:
            environment.actions.pop(stored.id, None)

    def lose(self, running: Running, reason: str, now: float) -> None:
        """Requeue or end an action whose node is gone; the node itself is out of the state already."""
        waiting, action = running.waiting, running.waiting.action
        self._ends.release(running, now)
        environment = self._state.environments.get(action.environment or "")
        opening = action.kind == "cpu.open" and environment is not None
        # Tries that an outside API refused or that never arrived lost no node; a restarted scheduler knows only their sum, and is careful.
        tried = running.grant.attempt - waiting.refused >= MOST_TRIES
        unwanted = running.stopping or (environment is not None and environment.close_requested)
        if (opening or (action.idempotent and action.environment is None)) and not tried and not unwanted:
            self._state.enter(waiting)
            self._out.append(Requeue(id=waiting.id, reason=reason))
            if opening and environment is not None:
                self._environments.wait_again(waiting, environment)
            else:
                self._enqueue(waiting, now)
            return
        if tried and action.idempotent:
            reason += f"; it was the {MOST_TRIES}nd node that this action lost, so it is not tried again"
        lost_on = running.grant.node if action.environment is not None else ""
        self._ends.note_end(running, "lost", reason, now, finished=None, environment_lost_on=lost_on)
        if opening and environment is not None:
            environment.lost = True
            self._environments.not_opened(environment, reason, now)
        elif environment is not None:
            environment.actions.pop(waiting.id, None)
