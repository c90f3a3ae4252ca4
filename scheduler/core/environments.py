"""Where environments are placed, and what waits for them.

An environment is placed once, by memory and load, and stays on its node. Its life cycle is in `lifecycle.py`.
Actions of an environment wait here, *parked*, for two things that are not units: that it is open, and that the
earlier action of the same shell session has ended. A worker is thus only ever handed what can start at once.
"""

from __future__ import annotations

import heapq
from typing import Final, Literal

from scheduler.core.open_order import OpenOrder
from scheduler.core.refusal import cores_refusal
from scheduler.core.state import STARTS, Node, State, memory_of, wants_cores
from scheduler.model import Environment, Grant, Waiting
from scheduler.model.commands import CloseEnvironment, Stop
from scheduler.model.events import EnvironmentGone
from scheduler.model.lifecycle import End

CLOSED: Final = "its trainer closed it"

NOTED_PART: Final = 0.1
"""Part of a lease after which another use of an environment is written down."""


class Environments:
    """Opens, places, closes and loses environments."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._order = OpenOrder(state)
        self._opening = 0
        self._next_start_s = float("-inf")
        self._leases: list[tuple[float, int, Environment]] = []
        self._leased = 0

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
        self._state.keep_environment(environment)
        self._state.opens.add(waiting)
        self._state.note(environment)
        self._state.room_returned = True

    def place(self, now: float) -> None:
        """Begin to open waiting environments, in the order of `OpenOrder`, as far as there is room and the caps on starting allow."""
        state = self._state
        while len(state.opens) and self._opening < state.limits.starting_limit and now >= self._next_start_s:
            chosen = self._order.next(now)
            if chosen is None:
                return
            waiting, node = chosen
            environment = state.environments[waiting.action.environment or ""]
            pod_cores = state.opens.needs_of(waiting).pod_cores
            state.opens.remove(waiting)
            self._put(environment, node, pod_cores)
            self._count_opening(environment, 1)
            if state.limits.starts_per_s:
                self._next_start_s = max(now, self._next_start_s) + 1.0 / state.limits.starts_per_s
            grant = Grant(node=node.spec.name, attempt=waiting.attempt + 1, units=max(1, pod_cores), core_ids=environment.pod_core_ids)
            state.start(waiting, grant, now, waiting.durations_s[0])
            state.note(environment)

    def _count_opening(self, environment: Environment, sign: int) -> None:
        self._opening += sign
        self._state.places.hold(environment.job, STARTS, sign)

    def next_start(self, now: float) -> float | None:
        """Return when the cap on starts per second lets the next environment begin; None where it does not matter."""
        return self._next_start_s if len(self._state.opens) and self._next_start_s > now else None

    def _put(self, environment: Environment, node: Node, pod_cores: int) -> None:
        environment.node = node.spec.name
        environment.state = "opening"
        node.environments[environment.id] = None
        node.memory_free -= environment.memory_mb
        self._state.count_place(environment, 1)
        if pod_cores:
            environment.pod_core_ids = node.cores.take(pod_cores)
            self._make_pod(environment, node)

    def _make_pod(self, environment: Environment, node: Node) -> None:
        node.cores.resize(-len(environment.pod_core_ids))
        self._state.pods[environment.id] = node.cores.pod(environment.pod_core_ids)

    def opened(self, environment: Environment, now: float) -> None:
        """Note that an environment stands: what was parked for it may go on, unless it is to be closed again."""
        self._count_opening(environment, -1)
        environment.state = "open"
        environment.last_used = now
        self._lease(environment)
        self._state.note(environment)
        asked = any(waiting.action.kind == "cpu.close" for waiting in environment.parked)
        if environment.close_requested and not asked:
            self.close_unasked(environment, environment.close_requested, now)
        elif not asked:
            parked = list(environment.parked)
            environment.parked.clear()
            for waiting in parked:
                self.admit(waiting, environment, now)
        self.place(now)

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
            self._lease(environment)
        self._state.touch(node.cores)

    def readopt_opening(self, environment: Environment, node: Node | None) -> None:
        """Take over an environment that an earlier scheduler had begun to open; its node may be gone."""
        self._count_opening(environment, 1)
        known = self._state.environments.get(environment.id)
        if known is not None:
            known.state, known.open_id, known.close_requested = "opening", environment.open_id, environment.close_requested
        elif node is None:
            environment.state = "opening"
            environment.pod_core_ids = ()
            self._state.keep_environment(environment)
        else:
            self._occupy(environment, node)

    def _occupy(self, environment: Environment, node: Node) -> None:
        self._state.keep_environment(environment)
        environment.state, environment.node = "opening", node.spec.name
        node.environments[environment.id] = None
        node.memory_free -= environment.memory_mb
        self._state.count_place(environment, 1)
        if environment.pod_core_ids:
            environment.pod_core_ids = node.cores.claim(environment.pod_core_ids)
            self._make_pod(environment, node)

    def not_opened(self, environment: Environment, reason: str, now: float) -> None:
        """Note that an environment could not be opened: its room is free, its actions fail, or are lost where it is."""
        self._count_opening(environment, -1)
        failed = f"it could not be opened: {reason}" if reason else "it could not be opened"
        self.forget(environment, reason if environment.lost else failed, now)
        self.place(now)

    def admit(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Queue an action of an environment for cores, or park it while it cannot run anyway."""
        session = waiting.action.session
        self._note_use(environment, now)
        refused = cores_refusal(self._state, environment, waiting.action)
        if refused is not None:
            environment.actions.pop(waiting.id, None)
            self._state.finish_waiting(waiting, refused.status, refused.reason, now)
            return
        environment.actions[waiting.id] = None
        if environment.state in ("waiting", "opening") or (session and environment.sessions.get(session, waiting.id) != waiting.id):
            environment.parked.append(waiting)
            return
        if session:
            environment.sessions[session] = waiting.id
        if wants_cores(waiting.action):
            group = self._state.core_group(environment)
            self._state.contend(waiting, group.queue, now)
            self._state.touch(group)
        else:
            assert environment.node is not None, "an open environment has a node"
            grant = Grant(node=environment.node, attempt=waiting.attempt + 1)
            self._state.start(waiting, grant, now, waiting.durations_s[0])

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
        self.place(now)

    def gone(self, environment: Environment, reason: str, now: float) -> None:
        """Note that an environment has ended by itself: what waits for it is lost, its room is free once what runs has ended."""
        environment.lost = True
        if not environment.actions:
            self.forget(environment, reason, now)
            self.place(now)
            return
        environment.state, environment.over = "closing", reason
        self._end_waiting(environment, f"environment {environment.id} is lost: {reason}", now)
        self._state.note(environment, reason)

    def unqueue(self, waiting: Waiting, environment: Environment, now: float) -> None:
        """Take a waiting action out, wherever in its environment it waits."""
        if waiting in environment.parked:
            environment.parked.remove(waiting)
            environment.actions.pop(waiting.id, None)
            return
        if environment.node is not None and wants_cores(waiting.action):
            self._state.core_group(environment).queue.remove(waiting)
        self.action_ended(waiting, environment, now)

    def closing(self, environment: Environment, reason: str, now: float) -> None:
        """Fail what waits and stop what runs in an environment that is being closed."""
        environment.state, environment.close_requested = "closing", environment.close_requested or reason
        self._end_waiting(environment, reason, now)
        for action_id in list(environment.actions):
            running = self._state.running.get(action_id)
            if running is not None and not running.stopping:
                running.stopping = reason
                self._state.out.append(Stop(id=action_id, node=running.grant.node, attempt=running.grant.attempt, reason=reason))
        self._state.note(environment, reason)

    def close_unasked(self, environment: Environment, reason: str, now: float) -> None:
        """Close an environment that no trainer will close: now if it is open, as soon as it stands if it is opening."""
        if environment.state == "opening":
            environment.close_requested = reason
            self._state.note(environment, reason)
        if environment.state != "open":
            return
        assert environment.node is not None, "an open environment has a node"
        self.closing(environment, reason, now)
        self._state.out.append(CloseEnvironment(id=environment.id, node=environment.node, reason=reason))

    def _note_use(self, environment: Environment, now: float) -> None:
        """Note that an environment is in use, in the journal once per part of a lease: a restarted scheduler lets the lease go on."""
        environment.last_used = now
        lease_s = self._state.limits.lease_s
        if environment.state == "open" and lease_s is not None and now - environment.use_noted >= lease_s * NOTED_PART:
            self._state.note(environment)

    def _lease(self, environment: Environment) -> None:
        """Note when the lease of an environment that has just opened is over, should nobody use it until then."""
        if self._state.limits.lease_s is not None:
            self._leased += 1
            heapq.heappush(self._leases, (environment.last_used + self._state.limits.lease_s, self._leased, environment))

    def next_lease(self, now: float) -> float | None:
        """Return when the next unused environment's lease is over; None where there are no leases.

        An environment has one entry, which is put off only when it comes up: what was used since has longer, what is
        in use has all of its time from now on.
        """
        while self._leases:
            due, number, environment = self._leases[0]
            if environment.state != "open" or self._state.environments.get(environment.id) is not environment:
                heapq.heappop(self._leases)
                continue
            used = now if environment.actions else environment.last_used
            later = used + (self._state.limits.lease_s or 0.0)
            if due > now or later <= due:
                return due
            heapq.heapreplace(self._leases, (later, number, environment))
        return None

    def end_leases(self, now: float) -> None:
        """Close the environments that nobody has used for as long as a lease lasts."""
        while (due := self.next_lease(now)) is not None and due <= now:
            self.close_unasked(self._leases[0][2], f"unused for {self._state.limits.lease_s:g} s", now)

    def forget(self, environment: Environment, reason: str, now: float) -> None:
        """Give back the room of an environment that was closed or lost, and remember how it ended."""
        how = "is lost" if environment.lost else "is gone"
        self._end_waiting(environment, f"environment {environment.id} {how}: {reason}", now)
        node = self._state.nodes.get(environment.node or "")
        if node is not None and environment.id in node.environments:
            del node.environments[environment.id]
            self._state.give_memory(node, environment.memory_mb)
            if environment.pod_core_ids:
                node.cores.resize(len(environment.pod_core_ids))
                node.cores.give_back(environment.pod_core_ids)
            self._state.touch(node.cores)
        if environment.node is not None:
            self._state.count_place(environment, -1)
        self._state.pods.pop(environment.id, None)
        environment.cut_short = environment.cut_short or environment.lost
        self._state.forget_environment(environment)
        state: Literal["closed", "lost"] = "lost" if environment.lost else "closed"
        environment.state = state
        self._state.gone.add(EnvironmentGone(id=environment.id, state=state, node=environment.node or "", reason=reason, at=now))
        self._state.note(environment, reason)

    def back_to_waiting(self, environment: Environment, now: float) -> None:
        """Let an environment open elsewhere whose node is gone before it stood."""
        self._count_opening(environment, -1)
        self._state.pods.pop(environment.id, None)
        if environment.node is not None:
            self._state.count_place(environment, -1)
        environment.state, environment.node, environment.pod_core_ids = "waiting", None, ()
        self._state.note(environment)

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
                self._state.core_group(environment).queue.remove(waiting)
            environment.actions.pop(action_id, None)
            if environment.sessions.get(waiting.action.session or "") == action_id:
                del environment.sessions[waiting.action.session or ""]
            self._state.finish_waiting(waiting, status, reason, now, environment_lost_on=lost_on)
