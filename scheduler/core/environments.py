"""The life of environments, and the actions that wait for them.

An environment is placed once (`open_order.py`) and stays on its node. Its life cycle is in `scheduler/model/lifecycle.py`. An
environment ends by one of these methods:

| method | when | its state then |
|---|---|---|
| `withdraw` | its opening has ended before a node was found | closed |
| `not_opened` | its node could not open it, or was lost meanwhile | closed or lost |
| `close_unasked` | its lease is over, its client is gone, or its job or trajectory is cancelled | closing, once it stands |
| `closing` | a trainer closes it, `close_unasked` does, or its node has closed it | closing |
| `closed` | its node has closed it | closed, once its last action has ended |
| `gone` | its processes have ended by themselves | lost; closing as long as it has actions |
| `forget` | the last step of the others; its node is lost | closed or lost; its room is free |

A scheduler that takes over enters environments by `adopt` and `readopt_opening`.

Actions wait here, *parked*, until their environment is open, its node is not silent, and the earlier action of the same shell session
has ended. So a worker only receives actions that can start at once.
"""

from __future__ import annotations

from typing import Final, Literal

from scheduler.core.breaker import Breaker
from scheduler.core.ends import Ends
from scheduler.core.gone_environments import GoneEnvironments
from scheduler.core.leases import Leases
from scheduler.core.memory import Memory
from scheduler.core.open_order import OpenOrder
from scheduler.core.open_queue import OpenQueue
from scheduler.core.pools import Pools
from scheduler.model import Environment, Grant, NodeSpec, Running, Waiting
from scheduler.model.commands import CloseEnvironment, Command, NoteEnvironment, Start
from scheduler.model.events import EnvironmentGone, LeaseRenewed
from scheduler.model.lifecycle import End
from scheduler.model.shares import Shares
from scheduler.model.state import Node, State, opened_by, wants_cores
from tangram.action import MEMORY_MB

CLOSED: Final = "its trainer closed it"

STARTS: Final = "starts"
"""Start slots as a resource: the environments that may be opening at once."""

LEAST_MEMORY_MB: Final = 1
"""Memory, in MB, for which an environment without declared memory counts in the shares. So many of them count more than few."""

NOTED_FRACTION: Final = 0.1
"""Fraction of a lease after which another use of an environment is written down."""


class Environments:
    """Opens, places, closes and loses environments."""

    def __init__(self, state: State, pools: Pools, memory: Memory, breaker: Breaker, ends: Ends, out: list[Command]) -> None:
        self._state = state
        self._pools = pools
        self._cpu = pools.cpu
        self.memory = memory
        memory.close = self.close_unasked
        self._breaker = breaker
        breaker.queue_open = self.queue
        self._ends = ends
        self._out = out
        self.ended = GoneEnvironments()
        self.opens = breaker.opens = OpenQueue(state.rules.pod_cores or 0)
        self.shares = Shares(state.limits.weights)
        """The memory of nodes and the start slots that jobs hold by environments. A job is active while it has any."""
        self.shares.offer(STARTS, state.limits.starting_limit)
        self.order = OpenOrder(state, pools.cpu, self.opens, self.shares, memory.books)
        self._changed = False
        self._returns_seen = (0, 0)
        self.opening = 0
        self.next_start_s = float("-inf")
        self.leases = Leases(state)

    def open(self, waiting: Waiting, now: float) -> None:
        """Take in a `cpu.open` action. Its environment is placed at the end of the event, or as soon as a node has room."""
        environment = opened_by(waiting, now)
        self._keep(environment)
        self._note(environment)
        if not self._breaker.holds_back(waiting):
            self.queue(waiting)

    def queue(self, waiting: Waiting) -> None:
        """Let an open wait for a node."""
        self.opens.add(waiting)
        self._changed = True

    def offer(self, spec: NodeSpec, sign: int) -> None:
        """Count the memory of a node that has come, or stop counting it with the `sign` -1."""
        if "cpu" in spec.pools:
            self.shares.offer(MEMORY_MB, sign * spec.memory_mb)
        self._changed = True

    def wait_again(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Let an environment open on another node, since its node is gone or silent before it stood, or could not open it."""
        self._count_opening(environment, -1)
        self._vacate(environment, now)
        environment.enter("waiting")
        environment.node, environment.pod_core_ids = None, ()
        self._note(environment)
        self._changed = True
        if not self._breaker.holds_back(waiting):
            self.queue(waiting)

    def withdraw(self, waiting: Waiting, environment: Environment, reason: str, cause: str, now: float) -> None:
        """Forget an environment that waits to be opened; the caller ends the action."""
        environment.cause = cause
        self.opens.remove(waiting)
        self.forget(environment, reason, now)

    def wake(self, now: float) -> None:
        """Close the environments whose lease is over."""
        for environment in self.leases.over(now):
            self.close_unasked(environment, self.leases.why(environment), "lease_over", now)
        self._changed = True

    def allocate(self, now: float) -> None:
        """Begin to open waiting environments, if room may have come free since the last time.

        They go in the order of `OpenOrder`, while nodes have room and the caps on starting allow.
        """
        returns = (self._pools.looks, self._cpu.cores_returned if self._state.rules.pod_cores else 0)
        if not self._changed and returns == self._returns_seen:
            return
        self._changed, self._returns_seen = False, returns
        state = self._state
        while len(self.opens) and self.opening < state.limits.starting_limit and now >= self.next_start_s:
            chosen = self.order.next(now)
            if chosen is None:
                return
            waiting, node = chosen
            environment = state.environments[waiting.action.environment or ""]
            pod_cores = self.opens.needs_of(waiting).pod_cores
            self.opens.remove(waiting)
            self._put(environment, node, pod_cores)
            self._count_opening(environment, 1)
            if state.limits.starts_per_s:
                self.next_start_s = max(now, self.next_start_s) + 1.0 / state.limits.starts_per_s
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
        self.opening += sign
        self.shares.hold(environment.job, STARTS, sign)

    def _keep(self, environment: Environment) -> None:
        self._state.environments[environment.id] = environment
        self.shares.enter(environment.job)

    def next_start(self, now: float) -> float | None:
        """Return when time alone may let the next environment begin; None if none waits for time."""
        times = (self.next_start_s, self.order.next_end_of_rest(now))
        return min((at for at in times if at is not None and at > now), default=None) if len(self.opens) else None

    def _put(self, environment: Environment, node: Node, pod_cores: int) -> None:
        environment.enter("opening")
        self._occupy(environment, node)
        if pod_cores:
            self._cpu.take_pod(environment, node, pod_cores)

    def _occupy(self, environment: Environment, node: Node, *, standing: bool = False) -> None:
        environment.node = node.spec.name
        node.environments[environment.id] = None
        self.memory.occupy(environment, node, standing=standing)
        self.shares.hold(environment.job, MEMORY_MB, max(environment.counted_mb, LEAST_MEMORY_MB))

    def opened(self, environment: Environment, now: float) -> None:
        """Note that an environment stands. Its parked actions go on, unless the environment is to be closed again."""
        self._count_opening(environment, -1)
        environment.enter("open")
        self.order.opened(self._state.nodes[environment.node or ""])
        environment.last_used = now
        self.leases.begin(environment, now)
        self._note(environment)
        asked = any(waiting.action.kind == "cpu.close" for waiting in environment.parked)
        if environment.close_requested and not asked:
            self.close_unasked(environment, environment.close_requested, environment.end_cause, now)
        elif not asked:
            self._admit_parked(environment, now)
        self._changed = True

    def heard_again(self, node: Node, now: float) -> None:
        """Let the actions go on that waited because the node of their environment was silent."""
        for environment in [self._state.environments[environment_id] for environment_id in node.environments]:
            self._cpu.group_of(environment, node).touch()
            if environment.state == "open":
                self._admit_parked(environment, now)

    def _admit_parked(self, environment: Environment, now: float) -> None:
        parked = list(environment.parked)
        environment.parked.clear()
        for waiting in parked:
            self.admit(waiting, environment, now)

    def adopt(self, environment: Environment, node: Node, used_at: float | None, now: float) -> None:
        """Take over an environment that an earlier scheduler had opened, and was closing if `close_requested` is set.

        Its lease goes on from `used_at`, if known. A part of the lease is added for two reasons. Uses are noted only once per part
        (`_note_use`), and actions that were sent meanwhile must arrive first.
        """
        environment.last_used = used_at if used_at is not None else now
        environment.use_noted = environment.last_used
        lease_s = self._state.limits.lease_s
        if lease_s is not None:
            environment.last_used = min(now, max(environment.last_used, now - lease_s) + lease_s * NOTED_FRACTION)
        self._resume(environment, node)
        environment.state = "closing" if environment.close_requested else "open"
        if environment.state == "open":
            self.leases.resume(environment, now)

    def readopt_opening(self, environment: Environment, node: Node | None) -> None:
        """Take over an environment that an earlier scheduler had begun to open. Its node may be gone."""
        self._count_opening(environment, 1)
        known = self._state.environments.get(environment.id)
        if known is not None:
            known.state, known.open_id = "opening", environment.open_id
            known.close_requested, known.cause = environment.close_requested, environment.cause
        elif node is None:
            environment.state = "opening"
            environment.pod_core_ids = ()
            self._keep(environment)
        else:
            self._resume(environment, node)

    def _resume(self, environment: Environment, node: Node) -> None:
        self._keep(environment)
        environment.state = "opening"
        self._occupy(environment, node, standing=True)
        self._cpu.resume_pod(environment, node)

    def not_opened(self, environment: Environment, reason: str, cause: str, now: float) -> None:
        """Note that an environment could not be opened. Its actions fail by the same cause, or are lost if it is lost."""
        environment.cause = cause
        self._count_opening(environment, -1)
        failed = f"it could not be opened: {reason}" if reason else "it could not be opened"
        self.forget(environment, reason if environment.lost else failed, now)

    def admit(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Queue an action of an environment for cores, or park it while it cannot run."""
        session = waiting.action.session
        self._note_use(environment, now)
        refused = self._cpu.refusal(waiting.action)
        if refused is not None:
            environment.actions.pop(waiting.id, None)
            self._ends.end_waiting(waiting, "rejected", refused, "impossible", now)
            return
        environment.actions[waiting.id] = None
        busy = session and environment.sessions.get(session, waiting.id) != waiting.id
        if environment.state in ("waiting", "opening") or busy or self._is_silent(environment):
            environment.parked.append(waiting)
            return
        if session:
            environment.sessions[session] = waiting.id
        if wants_cores(waiting.action):
            self._cpu.enqueue(waiting, now)
        else:
            self.start_on_its_node(waiting, environment, now)

    def _is_silent(self, environment: Environment) -> bool:
        node = self._state.nodes.get(environment.node or "")
        return node is not None and node.silent

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
        """Admit the next action of a session; after a refusal, the action after it."""
        while session not in environment.sessions and not self._is_silent(environment):
            following = next((w for w in environment.parked if w.action.session == session), None)
            if following is None:
                return
            environment.parked.remove(following)
            self.admit(following, environment, now)

    def closed(self, environment: Environment, reason: str, now: float) -> None:
        """Note that an environment no longer stands. Its room is free once its last action has ended."""
        if environment.actions:
            environment.over = reason
            return
        node = self._state.nodes.get(environment.node or "")
        if node is not None and not environment.lost:
            self.order.ended_well(node)
        self.forget(environment, reason, now)

    def gone(self, environment: Environment, reason: str, now: float) -> None:
        """Note that an environment ended by itself. Waiting actions are lost; its room is free once running actions end."""
        environment.lost = True
        if environment.end_cause == "environment_lost":  # neither its program nor a want of memory has ended it
            self.order.died(self._state.nodes[environment.node or ""], environment, now)
        if not environment.actions:
            self.forget(environment, reason, now)
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

    def closing(self, environment: Environment, reason: str, cause: str, now: float) -> None:
        """Close an environment: fail its waiting actions and stop its running actions."""
        environment.enter("closing")
        environment.cause = cause
        environment.close_requested = environment.close_requested or reason
        self._end_waiting(environment, reason, now)
        for action_id in list(environment.actions):
            running = self._state.running.get(action_id)
            if running is not None and not running.stopping:
                self._ends.stop(running, reason, cause)
        self._note(environment, reason)

    def close_unasked(self, environment: Environment, reason: str, cause: str, now: float) -> None:
        """Close an environment that no trainer will close. If it is opening, close it as soon as it stands."""
        if environment.state == "opening":
            environment.close_requested, environment.cause = reason, cause
            self._note(environment, reason)
        if environment.state != "open":
            return
        assert environment.node is not None, "an open environment has a node"
        self.closing(environment, reason, cause, now)
        self._out.append(CloseEnvironment(id=environment.id, node=environment.node, reason=reason))

    def _note_use(self, environment: Environment, now: float) -> None:
        """Note that an environment is in use. The journal gets a note once per part of a lease, for restarted schedulers."""
        environment.last_used = now
        lease_s = self._state.limits.lease_s
        due = lease_s is not None and now - environment.use_noted >= lease_s * NOTED_FRACTION
        if due and environment.state == "open" and environment.ends_at is None:
            self._note(environment)

    def renew_lease(self, renewed: LeaseRenewed, now: float) -> None:
        """Renew the lease of an environment. Do nothing if the environment is gone or being closed, or belongs to another job."""
        environment = self._state.environments.get(renewed.id)
        if environment is not None and environment.job == renewed.job and environment.state in ("waiting", "opening", "open"):
            self.leases.renew(environment, renewed.lease_s, now)
            self._note(environment)

    def forget(self, environment: Environment, reason: str, now: float) -> None:
        """Give back the room of an environment that was closed or lost, and remember how it ended."""
        how = "is lost" if environment.lost else "is gone"
        self._end_waiting(environment, f"environment {environment.id} {how}: {reason}", now)
        self._vacate(environment, now)
        environment.cut_short = environment.cut_short or environment.lost
        if self._state.environments.pop(environment.id, None) is not None:
            self.shares.leave(environment.job)
            self._cpu.ranking.trajectory_ended(environment)
        state: Literal["closed", "lost"] = "lost" if environment.lost else "closed"
        environment.enter(state)
        gone = EnvironmentGone(
            id=environment.id, state=state, node=environment.node or "", reason=reason, at=now, cause=environment.end_cause
        )
        self.ended.add(gone)
        self._note(environment, reason)
        self._changed = True

    def _vacate(self, environment: Environment, now: float) -> None:
        """Give back the room of an environment on its node."""
        node = self._state.nodes.get(environment.node or "")
        if node is not None and environment.id not in node.environments:
            node = None
        if node is not None:
            del node.environments[environment.id]
            self.memory.vacate(environment, node, now)
        self._cpu.environment_gone(environment, node)
        if environment.node is not None:
            self.shares.hold(environment.job, MEMORY_MB, -max(environment.counted_mb, LEAST_MEMORY_MB))

    def _note(self, environment: Environment, reason: str = "") -> None:
        """Ask for an environment's state to be written down."""
        environment.use_noted = environment.last_used
        self._out.append(NoteEnvironment.of(environment, reason, self.leases.noted_end(environment)))

    def _end_waiting(self, environment: Environment, reason: str, now: float) -> None:
        """End the waiting actions: as lost if the environment is lost, else as failed."""
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
            self._ends.end_waiting(waiting, status, reason, environment.end_cause, now, environment_lost_on=lost_on)
