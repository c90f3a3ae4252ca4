"""Where environments are placed, and what waits for them.

An environment is placed once, by memory and load, and stays on its node. Its life cycle is in `scheduler/model/lifecycle.py`.
Actions of an environment wait here, *parked*, for two things that are not units: that it is open, and that the
earlier action of the same shell session has ended. A worker is thus only ever handed what can start at once.
"""

from __future__ import annotations

from typing import Final, Literal

from scheduler.core.ends import Ends
from scheduler.core.gone import GoneEnvironments
from scheduler.core.leases import Leases
from scheduler.core.open_order import OpenOrder
from scheduler.core.open_queue import OpenQueue
from scheduler.core.pools import Pools
from scheduler.model import Environment, Grant, NodeSpec, Running, Waiting
from scheduler.model.commands import CloseEnvironment, Command, NoteEnvironment, Start, Stop
from scheduler.model.events import EnvironmentGone
from scheduler.model.lifecycle import End
from scheduler.model.shares import Shares
from scheduler.model.state import Node, State, memory_of, wants_cores
from tangram.action import MEMORY_MB

CLOSED: Final = "its trainer closed it"

STARTS: Final = "starts"
"""Start slots as a resource: the environments that may be opening at once."""

LEAST_MEMORY_MB: Final = 1
"""Memory, in MB, that an environment counts for in the shares where it declares none: many of those are more than few, too."""

NOTED_PART: Final = 0.1
"""Part of a lease after which another use of an environment is written down."""


class Environments:
    """Opens, places, closes and loses environments."""

    def __init__(self, state: State, pools: Pools, ends: Ends, out: list[Command]) -> None:
        self._state = state
        self._pools = pools
        self._cpu = pools.cpu
        self._ends = ends
        self._out = out
        self.ended = GoneEnvironments()
        self.opens = OpenQueue(state.rules.pod_cores or 0)
        self.places = Shares(state.limits.weights)
        """What jobs hold of the memory of nodes, and of start slots, by their environments; a job is active while it has any."""
        self.places.offer(STARTS, state.limits.starting_limit)
        self._order = OpenOrder(state, pools.cpu, self.opens, self.places)
        self._changed = False
        self._returns_seen = (0, 0)
        self._opening = 0
        self._next_start_s = float("-inf")
        self.leases = Leases(state)

    def open(self, waiting: Waiting, now: float) -> None:
        """Take in a `cpu.open` action; its environment is placed when the event is dealt with, or as soon as there is room."""
        action = waiting.action
        assert action.environment is not None, "checked by Action"
        environment = Environment(
            id=action.environment,
            job=action.job,
            trajectory=action.trajectory,
            memory_mb=memory_of(action),
            open_id=waiting.id,
            since=now,
            last_used=now,
            client="" if action.detached else action.client,
        )
        self._keep(environment)
        self.opens.add(waiting)
        self._note(environment)
        self._changed = True

    def joined(self, spec: NodeSpec) -> None:
        """Count the memory of a node that has come."""
        self._offer(spec, 1)

    def node_gone(self, spec: NodeSpec) -> None:
        """Count the memory of a node no longer."""
        self._offer(spec, -1)

    def _offer(self, spec: NodeSpec, sign: int) -> None:
        if "cpu" in spec.pools:
            self.places.offer(MEMORY_MB, sign * spec.memory_mb)
        self._changed = True

    def wait_again(self, waiting: Waiting, environment: Environment) -> None:
        """Let an environment open elsewhere whose node is gone before it stood."""
        self._count_opening(environment, -1)
        self._cpu.environment_gone(environment, None)
        if environment.node is not None:
            self._count_place(environment, -1)
        environment.enter("waiting")
        environment.node, environment.pod_core_ids = None, ()
        self._note(environment)
        self.opens.add(waiting)
        self._changed = True

    def withdraw(self, waiting: Waiting, environment: Environment, reason: str, now: float) -> None:
        """Forget an environment that waits to be opened; the caller ends the action."""
        self.opens.remove(waiting)
        self.forget(environment, reason, now)
        self._changed = True

    def wake(self, now: float) -> None:
        """Take note of the time."""
        self.end_leases(now)
        self._changed = True

    def allocate(self, now: float) -> None:
        """Begin to open waiting environments, if there may be room since the last time.

        They go in the order of `OpenOrder`, as far as there is room and the caps on starting allow.
        """
        returns = (self._pools.memory_returns, self._cpu.cores_returned if self._state.rules.pod_cores else 0)
        if not self._changed and returns == self._returns_seen:
            return
        self._changed, self._returns_seen = False, returns
        state = self._state
        while len(self.opens) and self._opening < state.limits.starting_limit and now >= self._next_start_s:
            chosen = self._order.next(now)
            if chosen is None:
                return
            waiting, node = chosen
            environment = state.environments[waiting.action.environment or ""]
            pod_cores = self.opens.needs_of(waiting).pod_cores
            self.opens.remove(waiting)
            self._put(environment, node, pod_cores)
            self._count_opening(environment, 1)
            if state.limits.starts_per_s:
                self._next_start_s = max(now, self._next_start_s) + 1.0 / state.limits.starts_per_s
            grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1, units=max(1, pod_cores), core_ids=environment.pod_core_ids)
            self._start(waiting, grant, now)
            self._note(environment)

    def _start(self, waiting: Waiting, grant: Grant, now: float) -> Running:
        self._out.append(Start(id=waiting.id, grant=grant))
        return self._state.start(waiting, grant, now, waiting.durations_s[0])

    def start_on_its_node(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Start an action that needs no units of its own."""
        assert environment.node is not None, "an open environment has a node"
        self._start(waiting, Grant(node=environment.node, attempt=waiting.attempt + 1), now)

    def _count_opening(self, environment: Environment, sign: int) -> None:
        self._opening += sign
        self.places.hold(environment.job, STARTS, sign)

    def _count_place(self, environment: Environment, sign: int) -> None:
        """Count what an environment that has a node holds of its memory, or holds no longer."""
        self.places.hold(environment.job, MEMORY_MB, sign * max(environment.memory_mb, LEAST_MEMORY_MB))

    def _keep(self, environment: Environment) -> None:
        """Take in an environment."""
        self._state.environments[environment.id] = environment
        self.places.enter(environment.job)

    def next_start(self, now: float) -> float | None:
        """Return when the cap on starts per second lets the next environment begin; None where it does not matter."""
        return self._next_start_s if len(self.opens) and self._next_start_s > now else None

    def _put(self, environment: Environment, node: Node, pod_cores: int) -> None:
        environment.node = node.spec.name
        environment.enter("opening")
        node.environments[environment.id] = None
        node.memory_free -= environment.memory_mb
        self._count_place(environment, 1)
        if pod_cores:
            self._cpu.take_pod(environment, node, pod_cores)

    def opened(self, environment: Environment, now: float) -> None:
        """Note that an environment stands: what was parked for it may go on, unless it is to be closed again."""
        self._count_opening(environment, -1)
        environment.enter("open")
        environment.last_used = now
        self.leases.begin(environment)
        self._note(environment)
        asked = any(waiting.action.kind == "cpu.close" for waiting in environment.parked)
        if environment.close_requested and not asked:
            self.close_unasked(environment, environment.close_requested, now)
        elif not asked:
            parked = list(environment.parked)
            environment.parked.clear()
            for waiting in parked:
                self.admit(waiting, environment, now)
        self._changed = True

    def adopt(self, environment: Environment, node: Node, used_at: float | None, now: float) -> None:
        """Take over an environment that an earlier scheduler had opened, and was closing where that is requested.

        Its lease goes on, where it is known when it was `used_at`.
        A part of the lease is added: its last use is noted only as often (`_note_use`), and what was sent meanwhile must arrive first.
        """
        environment.since, environment.last_used = now, used_at if used_at is not None else now
        environment.use_noted = environment.last_used
        lease_s = self._state.limits.lease_s
        if lease_s is not None:
            environment.last_used = min(now, max(environment.last_used, now - lease_s) + lease_s * NOTED_PART)
        self._occupy(environment, node)
        environment.state = "closing" if environment.close_requested else "open"
        if environment.state == "open":
            self.leases.begin(environment)

    def readopt_opening(self, environment: Environment, node: Node | None) -> None:
        """Take over an environment that an earlier scheduler had begun to open; its node may be gone."""
        self._count_opening(environment, 1)
        known = self._state.environments.get(environment.id)
        if known is not None:
            known.state, known.open_id, known.close_requested = "opening", environment.open_id, environment.close_requested
        elif node is None:
            environment.state = "opening"
            environment.pod_core_ids = ()
            self._keep(environment)
        else:
            self._occupy(environment, node)

    def _occupy(self, environment: Environment, node: Node) -> None:
        self._keep(environment)
        environment.state, environment.node = "opening", node.spec.name
        node.environments[environment.id] = None
        node.memory_free -= environment.memory_mb
        self._count_place(environment, 1)
        self._cpu.resume_pod(environment, node)

    def not_opened(self, environment: Environment, reason: str, now: float) -> None:
        """Note that an environment could not be opened: its room is free, its actions fail, or are lost where it is."""
        self._count_opening(environment, -1)
        failed = f"it could not be opened: {reason}" if reason else "it could not be opened"
        self.forget(environment, reason if environment.lost else failed, now)
        self._changed = True

    def admit(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Queue an action of an environment for cores, or park it while it cannot run anyway."""
        session = waiting.action.session
        self._note_use(environment, now)
        refused = self._cpu.refusal(waiting.action)
        if refused is not None:
            environment.actions.pop(waiting.id, None)
            self._ends.end_waiting(waiting, "rejected", refused, now)
            return
        environment.actions[waiting.id] = None
        if environment.state in ("waiting", "opening") or (session and environment.sessions.get(session, waiting.id) != waiting.id):
            environment.parked.append(waiting)
            return
        if session:
            environment.sessions[session] = waiting.id
        if wants_cores(waiting.action):
            self._cpu.enqueue(waiting, now)
        else:
            self.start_on_its_node(waiting, environment, now)

    def action_ended(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Let the next action of the same session go on."""
        environment.actions.pop(waiting.id, None)
        self._note_use(environment, now)
        session = waiting.action.session
        if session and environment.sessions.get(session) == waiting.id:
            del environment.sessions[session]
            if environment.state == "open":
                self._go_on(environment, session, now)
        if environment.over and not environment.actions:
            self.closed(environment, environment.over, now)

    def _go_on(self, environment: Environment, session: str, now: float) -> None:
        """Admit the next action of a session; one that is refused at once makes way for the one after it."""
        while session not in environment.sessions:
            following = next((w for w in environment.parked if w.action.session == session), None)
            if following is None:
                return
            environment.parked.remove(following)
            self.admit(following, environment, now)

    def closed(self, environment: Environment, reason: str, now: float) -> None:
        """Note that an environment stands no longer; its room is free once the last of its actions has ended."""
        if environment.actions:
            environment.over = reason
            return
        self.forget(environment, reason, now)
        self._changed = True

    def gone(self, environment: Environment, reason: str, now: float) -> None:
        """Note that an environment has ended by itself: what waits for it is lost, its room is free once what runs has ended."""
        environment.lost = True
        if not environment.actions:
            self.forget(environment, reason, now)
            self._changed = True
            return
        environment.enter("closing")
        environment.over = reason
        self._end_waiting(environment, f"environment {environment.id} is lost: {reason}", now)
        self._note(environment, reason)

    def unqueue(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Take a waiting action out, wherever in its environment it waits."""
        if waiting in environment.parked:
            environment.parked.remove(waiting)
            environment.actions.pop(waiting.id, None)
            return
        if environment.node is not None and wants_cores(waiting.action):
            self._cpu.withdraw(waiting)
        self.action_ended(waiting, environment, now)

    def closing(self, environment: Environment, reason: str, now: float) -> None:
        """Fail what waits and stop what runs in an environment that is being closed."""
        environment.enter("closing")
        environment.close_requested = environment.close_requested or reason
        self._end_waiting(environment, reason, now)
        for action_id in list(environment.actions):
            running = self._state.running.get(action_id)
            if running is not None and not running.stopping:
                running.stopping = reason
                self._out.append(Stop(id=action_id, node=running.grant.node, attempt=running.grant.attempt, reason=reason))
        self._note(environment, reason)

    def close_unasked(self, environment: Environment, reason: str, now: float) -> None:
        """Close an environment that no trainer will close: now if it is open, as soon as it stands if it is opening."""
        if environment.state == "opening":
            environment.close_requested = reason
            self._note(environment, reason)
        if environment.state != "open":
            return
        assert environment.node is not None, "an open environment has a node"
        self.closing(environment, reason, now)
        self._out.append(CloseEnvironment(id=environment.id, node=environment.node, reason=reason))

    def _note_use(self, environment: Environment, now: float) -> None:
        """Note that an environment is in use, in the journal once per part of a lease: a restarted scheduler lets the lease go on."""
        environment.last_used = now
        lease_s = self._state.limits.lease_s
        if environment.state == "open" and lease_s is not None and now - environment.use_noted >= lease_s * NOTED_PART:
            self._note(environment)

    def end_leases(self, now: float) -> None:
        """Close the environments that nobody has used for as long as a lease lasts."""
        for environment in self.leases.over(now):
            self.close_unasked(environment, f"unused for {self._state.limits.lease_s:g} s", now)

    def forget(self, environment: Environment, reason: str, now: float) -> None:
        """Give back the room of an environment that was closed or lost, and remember how it ended."""
        how = "is lost" if environment.lost else "is gone"
        self._end_waiting(environment, f"environment {environment.id} {how}: {reason}", now)
        node = self._state.nodes.get(environment.node or "")
        if node is not None and environment.id in node.environments:
            del node.environments[environment.id]
            self._pools.give_memory(node, environment.memory_mb)
        else:
            node = None
        self._cpu.environment_gone(environment, node)
        if environment.node is not None:
            self._count_place(environment, -1)
        environment.cut_short = environment.cut_short or environment.lost
        if self._state.environments.pop(environment.id, None) is not None:
            self.places.leave(environment.job)
            self._cpu.ranking.trajectory_ended(environment)
        state: Literal["closed", "lost"] = "lost" if environment.lost else "closed"
        environment.enter(state)
        self.ended.add(EnvironmentGone(id=environment.id, state=state, node=environment.node or "", reason=reason, at=now))
        self._note(environment, reason)

    def _note(self, environment: Environment, reason: str = "") -> None:
        """Ask for an environment's state to be written down."""
        environment.use_noted = environment.last_used
        self._out.append(
            NoteEnvironment(
                id=environment.id,
                state=environment.state,
                node=environment.node,
                job=environment.job,
                trajectory=environment.trajectory,
                memory_mb=environment.memory_mb,
                pod_core_ids=environment.pod_core_ids,
                reason=reason,
                client=environment.client,
                used_at=environment.last_used,
            )
        )

    def _end_waiting(self, environment: Environment, reason: str, now: float) -> None:
        """End what waits: as lost where its environment is, else as failed."""
        status: End = "lost" if environment.lost else "failed"
        lost_on = (environment.node or "") if environment.lost else ""
        for action_id in list(environment.actions):
            waiting = self._state.waiting.get(action_id)
            if waiting is None:
                continue
            if waiting in environment.parked:
                environment.parked.remove(waiting)
            elif environment.node in self._state.nodes and wants_cores(waiting.action):
                self._cpu.withdraw(waiting)
            environment.actions.pop(action_id, None)
            if environment.sessions.get(waiting.action.session or "") == action_id:
                del environment.sessions[waiting.action.session or ""]
            self._ends.end_waiting(waiting, status, reason, now, environment_lost_on=lost_on)
