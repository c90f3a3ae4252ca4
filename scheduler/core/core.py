"""The state machine of the whole system: `Core.handle(event, now) -> commands`.

Two rules hold here and in the modules of the core. First, no input or output: no clock, no randomness, no network, no SQL, no
threads; `now` comes in and commands go out. Second, the order of events is the only order. The live service and the simulator drive
the same object, and a recorded list of events leads to the same decisions.

The way of an action:

1. **Submission.** `Submitted` makes it a `Waiting`, counted for its job.
2. **Admission** (admission.py). An action that could never run, or is one too many of its job, is refused at once.
3. **Pool** (pools.py). It waits in the pool of cores, GPU cells or quotas. An action is *parked* first (environments.py) if its
   environment is not open yet, or its shell session is busy.
4. **Decision.** After the event, each pool holds a round over its changed groups. The policy's dispatcher decides which actions
   start or are resized.
5. **Command.** The decisions leave as `Start` and `Resize`, and the driver carries them out.
6. **End** (ends.py). `Finished` gives the action's units back. A worker sends it only once the processes are gone. The units of a
   lost node are given back at once (nodes.py).

Time enters by `Tick`; `next_wake` says when a tick would change something. After a restart the driver sends the journal's content
as events (recovery.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from scheduler.core.admission import Admission
from scheduler.core.breaker import Breaker
from scheduler.core.ends import Ends
from scheduler.core.environments import CLOSED, Environments
from scheduler.core.memory import Memory
from scheduler.core.nodes import Nodes
from scheduler.core.pools import Pools
from scheduler.core.recovery import Recovery
from scheduler.learning.durations import Observation
from scheduler.model import Environment, Limits, QuotaSpec, Running, ServiceSpec, Waiting, events
from scheduler.model.commands import Command, Requeue
from scheduler.model.lifecycle import End
from scheduler.model.state import State, wants_cells
from scheduler.policies import Policy
from scheduler.quotas.answers import may_wait_again, only_calls
from tangram.action import Action
from tangram.ends import NO_CAUSE, cause_of, fault_of

NEVER_OPENED: Final = "closed before it was opened"
BY_CLOSING: Final = "environment_closed"


class Core:
    """The scheduler without its surroundings."""

    def __init__(
        self,
        policy: Policy,
        *,
        limits: Limits | None = None,
        services: tuple[ServiceSpec, ...] = (),
        quotas: tuple[QuotaSpec, ...] = (),
        history: Sequence[Observation] = (),
    ) -> None:
        self.policy = policy
        self.state = State(policy.rules, limits or Limits(), services, history)
        self.pools = Pools(self.state, policy, quotas, history)
        self.decisions = 0
        self._out: list[Command] = []
        self.memory = Memory(self.state, self.pools, self._out)
        self.breaker = Breaker(self.state, self.pools)
        self._ends = Ends(self.state, self.pools, self.memory, self.breaker, self._out)
        self._environments = Environments(self.state, self.pools, self.memory, self.breaker, self._ends, self._out)
        self.memory_shares = self._environments.shares
        self._admission = Admission(self.state, self.pools, self._environments.ended)
        self._nodes = Nodes(self.state, self.pools, self._environments, self._ends, self._enqueue, self._out)
        self._recovery = Recovery(self.state, self.pools, self._environments, self._nodes, self._out)

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """Take in one event at time `now`, in seconds on the driver's clock, and return commands in order."""
        match event:
            case events.Submitted():
                self._submitted(event, now)
            case events.Finished():
                self._finished(event, now)
            case events.Started():
                self._started(event)
            case events.Sent():
                self._sent(event, now)
            case events.Used():
                self._used(event, now)
            case events.MemoryWanted():
                self.memory.wanted(event, now)
            case events.NodeBeat():
                self._nodes.beat(event, now)
            case events.Tick():
                self._tick(now)
            case events.Cancelled():
                self._cancelled(event, now)
            case events.NodeJoined():
                self._nodes.joined(event.node, now)
                if event.resumed:
                    self.pools.gpu.residency.resumed(event.node)
                else:
                    self.pools.gpu.residency.joined(event.node.name, now)
                if event.node.cells:
                    self._end_gone(self.pools.gpu.residency.gone(event.node.name, event.node.services), now)
            case events.NodeSilent():
                self._nodes.fell_silent(event.name, event.reason, now)
                self._take_stored(event.ended, now)
                if not event.hands_over:
                    self._nodes.leave_to_others(event.name, event.reason, now)
            case events.WorkerReplaced():
                self._take_stored(event.ended, now)
                self._nodes.worker_replaced(event, now)
            case events.NodeLost():
                self._nodes.lost(event, now)
            case events.NodeDrained():
                self._nodes.drained(event, now)
            case events.ServiceDescribed():
                self.state.services[event.service.name] = event.service
            case events.ServicesDeclared():
                self._end_gone(self.pools.gpu.residency.declared(event, now), now)
            case events.ServiceChanged():
                self.pools.gpu.residency.changed(event, now)
            case events.Spent():
                self.pools.quotas.spent(event.action, event.at)
            case events.NeverArrived():
                self._never_arrived(event, now)
            case events.EnvironmentOpened():
                self._recovery.environment_opened(event, now)
            case events.LeaseRenewed():
                self._environments.renew_lease(event, now)
            case events.EnvironmentGone():
                self._environments.ended.add(event)
            case events.HeldElsewhere():
                self.state.shares.set_elsewhere(event.units)
                self.memory_shares.set_elsewhere(event.memory)
            case events.ClientGone():
                self._client_gone(event, now)
            case events.EnvironmentClosed():
                self._closed(event, now)
            case events.Resumed():
                self._recovery.resumed(event, now)
        # All facts of an earlier scheduler are taken in before anything is given out.
        if not isinstance(event, events.Resumed) and not (isinstance(event, events.Submitted) and event.received_at is not None):
            self._allocate(now)
        while self.memory.begin(now):
            self._out += self.pools.allocate(now)
        out = self._out.copy()
        self._out.clear()
        return out

    def _allocate(self, now: float) -> None:
        """Give out free resources: first memory to environments, then units to actions."""
        self.breaker.settle(now)
        self._environments.allocate(now)
        self.decisions += self.pools.changed
        self._out += self.pools.allocate(now)

    def next_wake(self, now: float) -> float | None:
        """Return when a `Tick` would change something by itself; None if nothing waits for time.

        Missed beats are not included: a driver with nodes that can be lost ticks at least once a beat.
        """
        environments = self._environments
        times = [self.pools.next_wake(now), environments.next_start(now), environments.leases.next_end(now)]
        times += [self.memory.next_end(), self.breaker.next_wake()]
        deadlines = self.state.deadlines
        while deadlines and deadlines[0][1] not in self.state.waiting:
            heapq.heappop(deadlines)
        if deadlines:
            times.append(deadlines[0][0])
        return min([at for at in times if at is not None], default=None)

    def opening(self, now: float) -> dict[str, float]:
        """Return the opening environments `now`, the `waiting` ones, the `limit`, and the seconds until the rate allows another."""
        environments, limit = self._environments, self.state.limits.starting_limit
        next_in_s = max(0.0, environments.next_start_s - now)
        return {"now": environments.opening, "waiting": len(environments.opens), "limit": limit, "next_in_s": next_in_s}

    def _submitted(self, event: events.Submitted, now: float) -> None:
        state = self.state
        if event.id in state.waiting or event.id in state.running:
            return
        waiting = state.make_waiting(event.id, event.action, event.submitted_at, now if event.received_at is None else event.received_at)
        waiting.attempt, waiting.unit_s = event.attempt, event.unit_s
        state.enter(waiting)
        refused = self._admission.queue_refusal(waiting.action) if event.received_at is None else None
        refused = refused or self._admission.refusal(waiting.action, now)
        if refused is not None and waiting.action.kind == "cpu.open" and event.received_at is not None and refused.cause == "impossible":
            self._environments.open(waiting, now)  # the journal has the environment, which ends with its open
            self._drop_waiting(waiting, refused.status, refused.reason, refused.cause, now)
        elif refused is not None:
            lost_on = refused.environment_lost_on
            self._ends.end_waiting(waiting, refused.status, refused.reason, refused.cause, now, environment_lost_on=lost_on)
        else:
            self._enqueue(waiting, now)

    def _enqueue(self, waiting: Waiting, now: float) -> None:
        state, action = self.state, waiting.action
        environment = state.environments.get(action.environment or "")
        if action.kind == "cpu.open":
            self._environments.open(waiting, now)
        elif action.kind == "cpu.close" and environment is not None:
            self._close(waiting, environment, now)
        elif environment is not None:
            self._environments.admit(waiting, environment, now)
        elif wants_cells(action) and action.service not in state.services:
            self._ends.end_waiting(waiting, "rejected", f"no node declares service {action.service!r} any more", "service_gone", now)
        elif not self.breaker.holds_back(waiting):
            self.pools.of(action).enqueue(waiting, now)

    def _end_gone(self, gone: Sequence[str], now: float) -> None:
        """End the actions that wait for services that no node declares any more."""
        for waiting in [one for one in self.state.waiting.values() if one.action.service in gone and wants_cells(one.action)]:
            self._drop_waiting(waiting, "rejected", f"no node declares service {waiting.action.service!r} any more", "service_gone", now)

    def _close(self, waiting: Waiting, environment: Environment, now: float) -> None:
        if environment.state == "waiting":
            opener = self.state.waiting[environment.open_id]
            self._ends.end_waiting(opener, "cancelled", NEVER_OPENED, BY_CLOSING, now)
            self._environments.withdraw(opener, environment, NEVER_OPENED, BY_CLOSING, now)
            self._ends.end_waiting(waiting, "succeeded", "", NO_CAUSE, now)
            return
        if environment.state == "opening":
            environment.actions[waiting.id] = None
            environment.parked.append(waiting)
            return
        environment.close_requested = CLOSED
        self._environments.closing(environment, "its environment was closed", BY_CLOSING, now)
        self._environments.start_on_its_node(waiting, environment, now)

    def _started(self, event: events.Started) -> None:
        running = self.state.running.get(event.id)
        if running is not None and running.grant.attempt == event.attempt:
            if running.started_at is None:
                self.state.nodes[running.grant.node].idle_beats = 0
                running.expected_end += event.at - running.granted_at
                running.since = max(running.since, event.at)
            running.started_at = event.at

    def _sent(self, event: events.Sent, now: float) -> None:
        running = self.state.running.get(event.id)
        if running is not None and running.grant.attempt == event.attempt:
            self.pools.quotas.went_out(running, min(event.at, now))

    def _used(self, event: events.Used, now: float) -> None:
        running = self.state.running.get(event.id)
        if running is not None and running.grant.attempt == event.attempt:
            self.pools.cpu.used(running, event.background_cpu_s, now)

    def _finished(self, event: events.Finished, now: float) -> None:
        running = self.state.running.get(event.id)
        if running is None or running.grant.attempt != event.attempt:
            return
        if running.started_at is None and event.started_at is not None:
            self._started(events.Started(id=event.id, attempt=event.attempt, at=event.started_at))
        self.pools.quotas.answered(running, event, now)
        if event.told_by == "worker" and (in_background_s := running.background_s_at(now)):
            running.note_background(in_background_s - event.waited_s)
        self.pools.cpu.ranking.ended(running, now, counts=event.status not in ("cancelled", "lost"))
        self._ends.release(running, now, event)
        if event.waits_again and may_wait_again(running.waiting.action, running.grant):
            self._wait_again(running, event.reason or "the API refused it", now)
            return
        if event.waits_again and running.waiting.action.kind == "cpu.open":
            if self._nodes.open_elsewhere(running, event.reason, now):
                return
            event = replace(event, status="cancelled" if running.stopping else "failed", told_by="scheduler")  # no result is stored
        if event.status == "succeeded" and event.told_by == "worker":  # other sources lack figures
            self._ends.learn(running, event)
        # The core knows better than the worker why it had an action stopped.
        cause = running.stop_cause if event.status == "cancelled" and running.stop_cause else cause_of(event.status, event.cause)
        self._ends.note_end(running, event.status, event.reason, cause, now, finished=None if event.told_by == "scheduler" else event)
        self._after_end(running.waiting, event.status, event.reason, cause, now)

    def _take_stored(self, ended: Iterable[events.StoredEnd], now: float) -> None:
        """End running actions by their stored results."""
        for stored in [one for one in ended if one.id in self.state.running]:
            self._finished(stored.finished(self.state.running[stored.id].grant.attempt), now)

    def _never_arrived(self, event: events.NeverArrived, now: float) -> None:
        """Have an action whose requests were never made wait for new times: the times of its lost grant have passed.

        An action with cores or cells keeps them, and its grant is sent to its node again at once. Its requests count as made now.
        """
        running = self.state.running.get(event.id)
        if running is None or running.grant.attempt != event.attempt:
            return
        action = running.waiting.action
        if not only_calls(action):
            self.pools.quotas.made_now(running, now)
            return
        self.pools.quotas.never_made(running, now)
        self._ends.release(running, now)
        self._wait_again(running, f"node {running.grant.node} never got it", now)

    def _wait_again(self, running: Running, reason: str, now: float) -> None:
        """Put an untouched action back into its queue, unless its trainer gave it up."""
        if running.stopping:
            self._ends.note_end(running, "cancelled", running.stopping, running.stop_cause, now, finished=None)
            return
        waiting = running.waiting
        waiting.refused += 1
        self.state.enter(waiting)
        self._out.append(Requeue(id=waiting.id, reason=reason))
        self._enqueue(waiting, now)

    def _after_end(self, waiting: Waiting, status: End, reason: str, cause: str, now: float) -> None:
        """Carry the end of an action over to its environment."""
        environment = self.state.environments.get(waiting.action.environment or "")
        if environment is None:
            return
        if waiting.action.kind == "cpu.open":
            if status == "succeeded":
                self._opened(environment, now)
            else:
                if status == "failed":
                    self._environments.order.failed(environment.id, environment.node or "")
                self._environments.not_opened(environment, reason, cause, now)
        elif waiting.action.kind == "cpu.close":
            if environment.state == "closing":  # else it is a later environment of the same name
                self._environments.closed(environment, environment.close_requested, now)
        else:
            if status == "lost" and fault_of(cause) == "program" and environment.state == "open":
                environment.cause = cause  # the node's next beat says that it is lost
            self._environments.action_ended(waiting, environment, now)

    def _opened(self, environment: Environment, now: float) -> None:
        self._environments.opened(environment, now)
        closers = [waiting for waiting in environment.parked if waiting.action.kind == "cpu.close"]
        for closer in closers:
            environment.parked.remove(closer)
            del environment.actions[closer.id]
        if closers:
            self._close(closers[0], environment, now)
        for other in closers[1:]:
            self._ends.end_waiting(other, "failed", f"environment {environment.id} is being closed", BY_CLOSING, now)

    def _closed(self, event: events.EnvironmentClosed, now: float) -> None:
        """Carry out an environment's end on its node: end its actions and free its room."""
        environment = self.state.environments.get(event.id)
        if environment is None or environment.state not in ("open", "closing"):
            return
        if environment.state == "open":
            self._environments.closing(environment, event.reason, BY_CLOSING, now)
        self._environments.closed(environment, event.reason, now)

    def _cancelled(self, event: events.Cancelled, now: float) -> None:
        def concerned(one: Action | Environment) -> bool:
            return one.job == event.job and event.trajectory in (None, one.trajectory)

        self._cancel(event.ids, event.reason, event.cause, now)
        if event.job is not None:
            self._cancel_all(concerned, event.reason, event.cause, now)

    def _client_gone(self, event: events.ClientGone, now: float) -> None:
        def concerned(one: Action | Environment) -> bool:
            if isinstance(one, Action) and one.detached:  # an environment that a node already opens stays
                environment = self.state.environments.get(one.environment or "")
                return one.client == event.client and environment is not None and environment.state == "waiting"
            return one.client == event.client

        self._cancel_all(concerned, event.reason, "client_gone", now)

    def _cancel_all(self, concerned: Callable[[Action | Environment], bool], reason: str, cause: str, now: float) -> None:
        """Cancel the actions that are concerned, and close the environments."""
        state = self.state
        everything = [*state.waiting.values(), *(running.waiting for running in state.running.values())]
        # The last action first: it is gone before the end of an earlier action could start it.
        everything.sort(key=lambda waiting: -waiting.seq)
        self._cancel([w.id for w in everything if concerned(w.action) and w.action.kind != "cpu.close"], reason, cause, now)
        for environment in [one for one in state.environments.values() if concerned(one)]:
            environment.cut_short = True
            self._environments.close_unasked(environment, reason, cause, now)

    def _cancel(self, ids: Iterable[str], reason: str, cause: str, now: float) -> None:
        state = self.state
        for action_id in ids:
            waiting, running = state.waiting.get(action_id), state.running.get(action_id)
            if waiting is not None:
                self._drop_waiting(waiting, "cancelled", reason, cause, now)
            elif running is not None and not running.stopping and running.waiting.action.kind != "cpu.close":
                self._close_once_opened(running, reason, cause)
                self._ends.stop(running, reason, cause)

    def _close_once_opened(self, running: Running, reason: str, cause: str) -> None:
        """Close an environment once it is open, if its node opens it before the stop of its open arrives."""
        environment = self.state.environments.get(running.waiting.action.environment or "")
        if environment is not None and environment.state == "opening":
            environment.close_requested, environment.cause = reason, cause

    def _drop_waiting(self, waiting: Waiting, status: End, reason: str, cause: str, now: float) -> None:
        """End a waiting action, wherever it waits."""
        state, action = self.state, waiting.action
        environment = state.environments.get(action.environment or "")
        if action.kind == "cpu.open" and environment is not None:
            self._ends.end_waiting(waiting, status, reason, cause, now)
            self._environments.withdraw(waiting, environment, reason, cause, now)
            return
        if environment is not None:
            self._environments.unqueue(waiting, environment, now)
        else:
            self.pools.of(action).withdraw(waiting)
        self._ends.end_waiting(waiting, status, reason, cause, now)

    def _tick(self, now: float) -> None:
        state = self.state
        while state.deadlines and state.deadlines[0][0] <= now:
            _, action_id = heapq.heappop(state.deadlines)
            waiting = state.waiting.get(action_id)
            if waiting is not None:
                waited = f"waited longer than queue_timeout_s = {waiting.action.queue_timeout_s}"
                self._drop_waiting(waiting, "timed_out", waited, "queue_timeout", now)
        self.pools.wake(now)
        self._environments.wake(now)
        self.memory.wake(now)
