"""Nodes come, beat, fall silent, leave and are lost; the life cycle is in `scheduler/model/lifecycle.py`.

| a node | it gets | what may run elsewhere | its environments, and all else that runs there |
|---|---|---|---|
| is up | anything | runs | stand and run |
| is silent | only stops and closes | is given up and waits again, at once | wait for the node, and so do new actions for the environments |
| is silent, since its worker hands over | only stops and closes | runs on | the same |
| beats again | anything | is stopped where beats still show it | go on as if nothing had happened |
| goes on with another worker, which has adopted some environments | anything | waits again | the adopted ones stand; all else is lost |
| is lost | nothing | waits again | are lost |

A node is *silent* when it misses three beats, or when its worker hands over. An *idle* node is silent, too: it has beaten three times and
taken up no grant that was sent to it. A worker whose consumer hangs, or cannot reach the broker yet after a cut, looks alive from
outside. A node that takes up some grants between two beats is only slow. What a silent node holds may be minutes of a rollout, so the
scheduler waits for it, also where a request under a quota may still be under way. A node is *lost* when it reports a restart, or when it
has been silent or idle for `Limits.node_lost_s`.
`scheduler/live/heartbeats.py` finds these cases and sends `NodeSilent` and `NodeLost`, with the ends that are stored already.

An operator may *drain* a node. Its actions and environments go on to their end. New actions in its environments still run, so that
the environments can end. Nothing else begins on the node (`Node.takes`): no environment, no action that could run on another node,
no warm service. Actions that only this node could run wait. The flag stays with the node's name, so a lost node comes back
draining.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from scheduler.core.ends import Ends
from scheduler.core.environments import Environments
from scheduler.core.pools import Pools
from scheduler.model import Grant, NodeSpec, Running, Waiting, events
from scheduler.model.commands import Command, NoteDraining, NoteNode, Requeue
from scheduler.model.lifecycle import MISSED_BEATS, MOST_TRIES
from scheduler.model.state import Node, State, memory_of
from tangram.action import CORES, Action
from tangram.ends import cause_of, loss_cause

NODE_LOST = "node_lost"
RESTARTED = "its worker was restarted"
HANDS_OVER = "its worker hands over to the next one"

MOST_OPENS: Final = 3
"""The most tries of an open that nodes could not carry out. What fails on as many nodes fails on any."""

ASKED_BEATS = 4 * MISSED_BEATS
"""For so many beats a node is asked how an action that it does not run any more has ended."""


def takes_up_nothing(state: State, node: Node, beat: events.NodeBeat) -> bool:
    """Return whether a node has grants that it does not run, and has taken up no grant since its last beat.

    It had taken up what has started. Then the report of the end is missing, and the node is asked for it first.
    """
    taken_up = any(state.running[action_id].unseen_beats for action_id in node.running if action_id in beat.running)
    unseen = [state.running[action_id] for action_id in node.running if action_id not in beat.running]
    return not taken_up and any(one.started_at is None or one.unseen_beats > ASKED_BEATS for one in unseen)


def may_run_elsewhere(state: State, running: Running) -> bool:
    """Return whether an action may wait again when its node is silent or lost: an open, or what is idempotent and in no environment.

    It must still be wanted, and not have been tried too often. Tries that an outside API refused or that never arrived lost no node.
    A restarted scheduler knows only the sum of all tries, and is careful.
    """
    action = running.waiting.action
    environment = state.environments.get(action.environment or "")
    movable = environment is not None if action.kind == "cpu.open" else action.idempotent and action.environment is None
    unwanted = running.stopping or (environment is not None and environment.close_requested)
    return movable and not unwanted and not _tried_out(running)


def may_leave(state: State, running: Running) -> bool:
    """Return whether an action of a silent node is given up there. A request may still be at its API, where it holds its place."""
    return may_run_elsewhere(state, running) and not running.waiting.action.cost.quotas


def may_open_elsewhere(state: State, action: Action, grant: Grant) -> bool:
    """Return whether an open waits for another node if the node of this grant cannot carry it out.

    It must not have failed too often, and there must be another node for it, which may rest.
    """
    if action.kind != "cpu.open" or grant.attempt >= MOST_OPENS:
        return False
    others = (node for name, node in state.nodes.items() if name != grant.node and node.takes("cpu", action.requires))
    return any(action.cost.least(CORES) <= node.spec.cores and memory_of(action) <= node.spec.memory_mb for node in others)


def _loss_reason(event: events.NodeLost | events.WorkerReplaced, environment_id: str | None) -> str:
    """Return why something of a lost node is lost. What was in an environment has the reason of that environment."""
    why = (f", and could not go on with environment {loss.id}: {loss.reason}" for loss in event.lost if loss.id == environment_id)
    return f"node {event.name} was lost: {event.reason or RESTARTED}{next(why, '')}"


def _tried_out(running: Running) -> bool:
    return running.grant.attempt - running.waiting.refused >= MOST_TRIES


class Nodes:
    """Keeps the nodes, and decides on the actions of a silent or lost node."""

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
        """Take in a node that is not there."""
        state = self._state
        node = state.nodes[spec.name] = Node(spec, spec.memory_mb, now, draining=spec.name in state.draining)
        state.offer(spec, 1)
        self._out.append(NoteNode(name=spec.name, state="up"))
        if node.draining:  # the journal may have got the flag before it knew the node
            self._out.append(NoteDraining(name=spec.name, draining=True))
        self._pools.joined(node)
        self._environments.offer(spec, 1)

    def drained(self, event: events.NodeDrained, now: float) -> None:
        """Begin or end the draining of a node. All waiting actions are looked at again."""
        state, node = self._state, self._state.nodes.get(event.name)
        if event.draining:
            state.draining[event.name] = None
        else:
            state.draining.pop(event.name, None)
        self._out.append(NoteDraining(name=event.name, draining=event.draining))
        if node is None or node.draining == event.draining:
            return
        node.draining = event.draining
        self._look_again(node, now)

    def _look_again(self, node: Node, now: float) -> None:
        """Look at all waiting actions again, since a node has begun or ceased to take something new."""
        for each in self._state.nodes.values():
            self._pools.look_again(each)
        if node.heard and node.takes_new:
            self._pools.gpu.residency.joined(node.spec.name, now)

    def fell_silent(self, name: str, reason: str, now: float) -> None:
        """Let nothing begin on a node any more."""
        node = self._state.nodes.get(name)
        if node is not None and not node.silent:
            node.silent = True
            self._out.append(NoteNode(name=name, state="silent", reason=reason))
            self._look_again(node, now)

    def leave_to_others(self, name: str, reason: str, now: float) -> None:
        """Have all actions of a silent node that may leave it wait again."""
        node, state = self._state.nodes.get(name), self._state
        for running in [state.running[action_id] for action_id in node.running] if node is not None else ():
            if may_leave(state, running):
                self._ends.release(running, now)
                self._wait_again(running, f"node {name} is silent: {reason}", now)

    def _heard_again(self, node: Node, now: float) -> None:
        """Let a node that was silent go on."""
        node.silent = False
        self._out.append(NoteNode(name=node.spec.name, state="up"))
        self._environments.heard_again(node, now)
        self._look_again(node, now)

    def beat(self, event: events.NodeBeat, now: float) -> None:
        """Note that a node lives, and count the beats in which it takes up no grant."""
        node = self._state.nodes.get(event.name)
        if node is None:
            return
        node.last_beat = now
        node.idle_beats = node.idle_beats + 1 if takes_up_nothing(self._state, node, event) else 0
        for action_id in node.running:
            running = self._state.running[action_id]
            running.unseen_beats = 0 if action_id in event.running else running.unseen_beats + 1
        self._forget_closed(node, event, now)
        self._environments.memory.beat(node, event.allowed, now)
        if node.silent and not event.excused and node.idle_beats <= MISSED_BEATS:
            self._heard_again(node, now)

    def _forget_closed(self, node: Node, event: events.NodeBeat, now: float) -> None:
        """Take back the room of environments that the node no longer holds.

        A node may write a beat before an environment is open, and send it after the report of the open. So an open one is lost with the
        second beat in a row that does not name it, unless the beat says how it ended. Beats before the report do not count.
        """
        if event.environments is None:
            return
        losses = {loss.id: loss for loss in event.lost}
        for environment in [self._state.environments[each] for each in node.environments]:
            is_missing = environment.state != "opening" and environment.id not in event.environments
            environment.unseen_beats = environment.unseen_beats + 1 if is_missing else 0
            if not is_missing:
                continue
            if environment.state == "closing" and not environment.actions:
                why = environment.over or environment.close_requested or "closed by the system"
                self._environments.closed(environment, why, now)
            elif environment.state == "open" and (environment.unseen_beats > 1 or environment.id in losses):
                loss = losses.get(environment.id)
                if loss is not None and not environment.cause:  # else the end of a command has given the cause already
                    environment.cause = loss_cause(loss.cause)
                reason = loss.reason if loss is not None else f"it ended on node {node.spec.name}"
                self._environments.gone(environment, reason, now)

    def lost(self, event: events.NodeLost, now: float) -> None:
        """Forget a node. Its environments are lost. Its actions wait again or are lost, except the actions in `ended`."""
        state = self._state
        node = state.nodes.pop(event.name, None)
        if node is None:
            return
        state.offer(node.spec, -1)
        self._out.append(NoteNode(name=event.name, state="left" if event.left else "lost", reason=event.reason))
        gone = [state.environments[environment_id] for environment_id in node.environments]
        ends = {stored.id: stored for stored in event.ended}
        for running in [state.running[action_id] for action_id in node.running]:
            reason = _loss_reason(event, running.waiting.action.environment)
            self.lose(running, reason, now, ends.get(running.waiting.id))
        for environment in gone:
            if environment.state in ("open", "closing"):
                environment.lost = True
                self._environments.forget(environment, _loss_reason(event, environment.id), now)
        self._pools.gone(node)
        self._environments.offer(node.spec, -1)
        self._environments.memory.forget(event.name)

    def _end(self, running: Running, stored: events.StoredEnd, lost: str, now: float) -> None:
        """End an action of a lost node by its stored result. Nothing is learned, since figures are missing.

        The trainer of a successful open has its result. So the open has succeeded, and its environment is lost like any other.
        """
        self._ends.release(running, now)
        cause = cause_of(stored.status, stored.cause)
        self._ends.note_end(running, stored.status, stored.reason, cause, now, finished=stored.finished(running.grant.attempt))
        environment = self._state.environments.get(running.waiting.action.environment or "")
        if environment is not None and running.waiting.action.kind == "cpu.open":
            environment.lost = stored.status == "succeeded"
            reason, cause = (lost, NODE_LOST) if environment.lost else (stored.reason, cause)
            self._environments.not_opened(environment, reason, cause, now)
        elif environment is not None:
            environment.actions.pop(stored.id, None)

    def worker_replaced(self, event: events.WorkerReplaced, now: float) -> None:
        """Go on with the environments that the next worker of a node has adopted, and what runs there. What else the node held is gone."""
        state, node = self._state, self._state.nodes.get(event.name)
        if node is None:
            return
        for running in [state.running[action_id] for action_id in node.running]:
            environment = state.environments.get(running.waiting.action.environment or "")
            adopted = environment is not None and environment.id in event.environments and environment.state in ("open", "closing")
            if adopted and running.waiting.id in event.running:
                running.unseen_beats = 0
            elif adopted and environment is not None:
                self._ends.release(running, now)
                self._ends.note_end(running, "lost", f"the worker of node {event.name} was restarted", NODE_LOST, now, finished=None)
                self._environments.action_ended(running.waiting, environment, now)
            else:
                self.lose(running, _loss_reason(event, running.waiting.action.environment), now)
        for environment in [state.environments[environment_id] for environment_id in node.environments]:
            if environment.id not in event.environments:
                environment.lost = True
                self._environments.forget(environment, _loss_reason(event, environment.id), now)
        node.last_beat, node.idle_beats = now, 0
        if node.silent:
            self._heard_again(node, now)

    def open_elsewhere(self, running: Running, reason: str, now: float) -> bool:
        """Have an open that its node could not carry out wait for another one, and the node rest. Return False if nobody wants it.

        The caller has released the action.
        """
        node = self._state.nodes.get(running.grant.node)
        environment = self._state.environments.get(running.waiting.action.environment or "")
        if node is not None:
            self._environments.order.not_opened(node, running.waiting.action.environment or "", now)
        if running.stopping or environment is None or environment.close_requested:
            return False
        running.waiting.refused += 1
        self._wait_again(running, f"node {running.grant.node} could not open it: {reason}", now)
        return True

    def lose(self, running: Running, reason: str, now: float, stored: events.StoredEnd | None = None) -> None:
        """Requeue or end an action of a node that is gone, or whose worker is another one. A stored result is its end."""
        if stored is not None:
            self._end(running, stored, reason, now)
            return
        waiting, action = running.waiting, running.waiting.action
        self._ends.release(running, now)
        if may_run_elsewhere(self._state, running):
            self._wait_again(running, reason, now)
            return
        environment = self._state.environments.get(action.environment or "")
        opening = action.kind == "cpu.open" and environment is not None
        if _tried_out(running) and action.idempotent:
            reason += f"; it was the {MOST_TRIES}nd node that this action lost, so it is not tried again"
        lost_on = running.grant.node if action.environment is not None else ""
        cause = NODE_LOST if action.environment is None or opening else "environment_lost"
        self._ends.note_end(running, "lost", reason, cause, now, finished=None, environment_lost_on=lost_on)
        if opening and environment is not None:
            environment.lost = True
            self._environments.not_opened(environment, reason, NODE_LOST, now)
        elif environment is not None:
            environment.actions.pop(waiting.id, None)

    def _wait_again(self, running: Running, reason: str, now: float) -> None:
        """Have an action wait again that its node has given back. Another node may open the environment of an open."""
        waiting = running.waiting
        environment = self._state.environments.get(waiting.action.environment or "")
        self._state.enter(waiting)
        self._out.append(Requeue(id=waiting.id, reason=reason))
        if environment is not None:
            self._environments.wait_again(waiting, environment, now)
        else:
            self._enqueue(waiting, now)
