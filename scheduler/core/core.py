"""The state machine of the whole system: `Core.handle(event, now) -> commands`.

Two rules of what may live here and in the modules it is made of. No input or output: no clock, no randomness, no
network, no SQL, no threads; `now` comes in and commands go out. And no order that is not the order of events: the
live service and the simulator drive this same object, and a recorded list of events leads to the same decisions.

Theory of operation:

1. An event changes the `State` (state.py). What it changed marks its *group* of units as dirty.
2. When the event is dealt with, the `Dispatcher` (dispatch.py) looks at each dirty group, asks the policy
   (policies/) what starts, takes the units (resources/) and emits `Start`.
3. `Environments` (environments.py) places sandboxes and parks actions that could not run anyway.
4. An action's units come back with `Finished`, which a worker sends when the processes are gone, not before
   (ends.py); a node that is lost gives back all of its own (nodes.py). What an outside API answered is in answers.py.
5. Time enters by `Tick`. `next_wake` says when one would change something.
6. What a worker says of the models on its cells is compared with what is known of them (residency.py).
7. After a restart the driver tells what the journal knew (recovery.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from scheduler.core.dispatch import Dispatcher
from scheduler.core.ends import Ends
from scheduler.core.environments import CLOSED, Environments
from scheduler.core.nodes import Nodes
from scheduler.core.recovery import Recovery
from scheduler.core.refusal import refusal
from scheduler.core.residency import Residency
from scheduler.core.state import State, wants_cells, wants_cores
from scheduler.learning.durations import Observation
from scheduler.model import Environment, Limits, QuotaSpec, Running, ServiceSpec, Waiting, events
from scheduler.model.commands import Command, Requeue, Stop
from scheduler.model.lifecycle import End
from scheduler.policies.abstract import Policy
from scheduler.quotas.answers import may_wait_again, note_answer, note_sent, only_calls
from tangram.action import Action


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
        self.state = State(policy, limits or Limits(), services, quotas, history)
        self.decisions = 0
        self._dispatcher = Dispatcher(self.state)
        self._environments = Environments(self.state)
        self._ends = Ends(self.state, self._dispatcher)
        self._nodes = Nodes(self.state, self._dispatcher, self._environments, self._ends, self._enqueue)
        self._residency = Residency(self.state)
        self._recovery = Recovery(self.state, self._environments, self._nodes)

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """Take in one event at time `now`, in seconds on the driver's clock, and return what is to be done, in order."""
        match event:
            case events.Submitted():
                self._submitted(event, now)
            case events.Finished():
                self._finished(event, now)
            case events.Started():
                self._started(event)
            case events.Sent():
                note_sent(self.state, event, now)
            case events.Used():
                self._used(event, now)
            case events.NodeBeat():
                self._nodes.beat(event, now)
            case events.Tick():
                self._tick(now)
            case events.Cancelled():
                self._cancelled(event, now)
            case events.NodeJoined():
                self._nodes.joined(event.node, now)
                if event.resumed:
                    self._residency.resumed(event.node)
                else:
                    self._residency.joined(event.node.name, now)
                if event.node.cells:
                    self._end_gone(self._residency.gone(event.node.name, event.node.services), now)
            case events.NodeLost():
                self._nodes.lost(event.name, event.reason, now, left=event.left, ended=event.ended)
            case events.ServiceDescribed():
                self.state.services[event.service.name] = event.service
            case events.ServicesDeclared():
                self._end_gone(self._residency.declared(event, now), now)
            case events.ServiceChanged():
                self._residency.changed(event, now)
            case events.Spent():
                self._recovery.spent(event)
            case events.NeverArrived():
                self._never_arrived(event, now)
            case events.EnvironmentOpened():
                self._recovery.environment_opened(event, now)
            case events.EnvironmentGone():
                self.state.gone.add(event)
            case events.ClientGone():
                self._client_gone(event, now)
            case events.EnvironmentClosed():
                self._closed(event, now)
            case events.Resumed():
                self._recovery.resumed(event, now)
        # What an earlier scheduler knew is taken up whole before anything is shared out anew.
        if not isinstance(event, events.Resumed) and not (isinstance(event, events.Submitted) and event.received_at is not None):
            self._share_out(now)
        out, self.state.out = self.state.out, []
        return out

    def _share_out(self, now: float) -> None:
        """Start what can start since something changed."""
        looked = self._dispatcher.run(now)
        while self.state.room_returned:
            self.state.room_returned = False
            self._environments.place(now)
            self._dispatcher.start_unplaced(now)
            looked = self._dispatcher.run(now) or looked
        if looked:
            self.decisions += 1

    def next_wake(self, now: float) -> float | None:
        """Return when a `Tick` would change something by itself; None where nothing waits for time.

        Missed beats are not in it: a driver with nodes that can be lost ticks at least once a beat.
        """
        times = [self._dispatcher.holds.next_opening(now), self._environments.next_start(now), self._environments.next_lease(now)]
        times += [self._dispatcher.next_look(), self._residency.next_warm()]
        times.append(self.state.next_look())
        deadlines = self.state.deadlines
        while deadlines and deadlines[0][1] not in self.state.waiting:
            heapq.heappop(deadlines)
        if deadlines:
            times.append(deadlines[0][0])
        return min((at for at in times if at is not None), default=None)

    def _submitted(self, event: events.Submitted, now: float) -> None:
        state = self.state
        if event.id in state.waiting or event.id in state.running:
            return
        waiting = state.make_waiting(event.id, event.action, event.submitted_at, now if event.received_at is None else event.received_at)
        waiting.attempt = event.attempt
        state.enter(waiting)
        refused = refusal(state, waiting.action, now)
        if refused is not None:
            state.finish_waiting(waiting, refused.status, refused.reason, now, environment_lost_on=refused.environment_lost_on)
            return
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
            state.finish_waiting(waiting, "rejected", f"no node declares service {action.service!r} any more", now)
        elif wants_cells(action):
            state.floating_cells.add(waiting)
            self._dispatcher.came(waiting, now)
            for node in state.nodes.values():
                if node.cells.capacity:
                    state.touch(node.cells)
        elif wants_cores(action):
            state.contend(waiting, state.floating_cores, now)
            for node in state.nodes.values():
                if node.offers("cpu", action.requires):
                    state.touch(node.cores)
        elif action.cost.quotas:
            quota = state.quotas[action.cost.quotas[0]]
            quota.queue.add(waiting)
            state.touch(quota)
        else:
            state.unplaced.add(waiting)
            self._dispatcher.start_unplaced(now)

    def _end_gone(self, gone: Sequence[str], now: float) -> None:
        """End the actions that wait for services that no node declares any more."""
        for waiting in [one for one in self.state.waiting.values() if one.action.service in gone and wants_cells(one.action)]:
            self._drop_waiting(waiting, "rejected", f"no node declares service {waiting.action.service!r} any more", now)

    def _close(self, waiting: Waiting, environment: Environment, now: float) -> None:
        if environment.state == "waiting":
            opener = self.state.waiting[environment.open_id]
            self.state.opens.remove(opener)
            self.state.finish_waiting(opener, "cancelled", "closed before it was opened", now)
            self._environments.forget(environment, "closed before it was opened", now)
            self.state.finish_waiting(waiting, "succeeded", "", now)
            self._environments.place(now)
            return
        if environment.state == "opening":
            environment.actions[waiting.id] = None
            environment.parked.append(waiting)
            return
        environment.close_requested = CLOSED
        self._environments.closing(environment, "its environment was closed", now)
        self._dispatcher.start_without_units(waiting, self.state.nodes[environment.node or ""], now)

    def _started(self, event: events.Started) -> None:
        running = self.state.running.get(event.id)
        if running is not None and running.grant.attempt == event.attempt:
            if running.started_at is None:
                running.expected_end += event.at - running.granted_at
                running.since = max(running.since, event.at)
            running.started_at = event.at

    def _used(self, event: events.Used, now: float) -> None:
        """Take in what an action has got in the background, and rank it anew."""
        state, running = self.state, self.state.running.get(event.id)
        if running is None or running.grant.attempt != event.attempt:
            return
        node = state.nodes.get(running.grant.node)
        most_s = (now - running.granted_at) * (node.spec.cores if node is not None else 1)
        running.note_background(min(event.background_cpu_s, most_s))
        environment = state.environments.get(running.waiting.action.environment or "")
        group = state.core_group(environment) if environment is not None else None
        if group is not None and event.id in group.background:
            state.note_work(running, now)
            state.rank_again(running.waiting, group.queue)
            state.touch(group)

    def _finished(self, event: events.Finished, now: float) -> None:
        running = self.state.running.get(event.id)
        if running is None or running.grant.attempt != event.attempt:
            return
        note_answer(self.state, running, event, now)
        if event.told_by == "worker" and (in_background_s := running.background_s_at(now)):
            running.note_background(in_background_s - event.waited_s)
        self.state.end_work(running, now, counts=event.status not in ("cancelled", "lost"))
        self._ends.release(running, now)
        if event.waits_again and may_wait_again(running.waiting.action, running.grant):
            self._wait_again(running, event.reason or "the API refused it", now)
            return
        if event.status == "succeeded" and event.told_by == "worker":  # of others, figures are missing
            self._ends.learn(running, event)
        self._ends.note_end(running, event.status, event.reason, now, finished=None if event.told_by == "scheduler" else event)
        self._after_end(running.waiting, event.status, event.reason, now)

    def _never_arrived(self, event: events.NeverArrived, now: float) -> None:
        """Have requests that were never made wait for their turn anew: that of a grant which got lost has passed.

        What holds other resources keeps them, and is sent to its node again at once; its requests count as made now.
        """
        running = self.state.running.get(event.id)
        if running is None or running.grant.attempt != event.attempt:
            return
        action = running.waiting.action
        if not only_calls(action):
            for account, requests, _ in self.state.draws(action):
                account.charge(requests, 0, now)
            return
        for account, _, tokens in self.state.draws(action):
            account.charge(0, -tokens, now)
        self._ends.release(running, now)
        self._wait_again(running, f"node {running.grant.node} never got it", now)

    def _wait_again(self, running: Running, reason: str, now: float) -> None:
        """Put an action of which nothing was done back to where it stood, unless its trainer gave it up."""
        if running.stopping:
            self._ends.note_end(running, "cancelled", running.stopping, now, finished=None)
            return
        waiting = running.waiting
        waiting.refused += 1
        self.state.enter(waiting)
        self.state.out.append(Requeue(id=waiting.id, reason=reason))
        self._enqueue(waiting, now)

    def _after_end(self, waiting: Waiting, status: End, reason: str, now: float) -> None:
        """Do what the end of an action means for its environment."""
        environment = self.state.environments.get(waiting.action.environment or "")
        if environment is None:
            return
        if waiting.action.kind == "cpu.open":
            if status == "succeeded":
                self._opened(environment, now)
            else:
                self._environments.not_opened(environment, reason, now)
        elif waiting.action.kind == "cpu.close":
            if environment.state == "closing":  # else it is a later one of the same name
                self._environments.closed(environment, environment.close_requested, now)
        else:
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
            self.state.finish_waiting(other, "failed", f"environment {environment.id} is being closed", now)

    def _closed(self, event: events.EnvironmentClosed, now: float) -> None:
        """Do what follows from an environment's end on its node: its actions end too, its room is free."""
        environment = self.state.environments.get(event.id)
        if environment is None or environment.state not in ("open", "closing"):
            return
        if environment.state == "open":
            self._environments.closing(environment, event.reason, now)
        self._environments.closed(environment, event.reason, now)

    def _cancelled(self, event: events.Cancelled, now: float) -> None:
        def concerned(one: Action | Environment) -> bool:
            return one.job == event.job and event.trajectory in (None, one.trajectory)

        self._cancel(event.ids, event.reason, now)
        if event.job is not None:
            self._cancel_all(concerned, event.reason, now)

    def _client_gone(self, event: events.ClientGone, now: float) -> None:
        def concerned(one: Action | Environment) -> bool:
            if isinstance(one, Action) and one.detached:  # what a node opens already stays
                environment = self.state.environments.get(one.environment or "")
                return one.client == event.client and environment is not None and environment.state == "waiting"
            return one.client == event.client

        self._cancel_all(concerned, event.reason, now)

    def _cancel_all(self, concerned: Callable[[Action | Environment], bool], reason: str, now: float) -> None:
        """Cancel the actions that are concerned, and close the environments."""
        state = self.state
        everything = [*state.waiting.values(), *(running.waiting for running in state.running.values())]
        # The last first: an action that waited for another one is gone before that one's end could start it.
        everything.sort(key=lambda waiting: -waiting.seq)
        self._cancel([w.id for w in everything if concerned(w.action) and w.action.kind != "cpu.close"], reason, now)
        for environment in [one for one in state.environments.values() if concerned(one)]:
            environment.cut_short = True
            self._environments.close_unasked(environment, reason, now)

    def _cancel(self, ids: Iterable[str], reason: str, now: float) -> None:
        state = self.state
        for action_id in ids:
            waiting, running = state.waiting.get(action_id), state.running.get(action_id)
            if waiting is not None:
                self._drop_waiting(waiting, "cancelled", reason, now)
            elif running is not None and not running.stopping and running.waiting.action.kind != "cpu.close":
                running.stopping = reason
                self._close_once_opened(running, reason)
                state.out.append(Stop(id=action_id, node=running.grant.node, attempt=running.grant.attempt, reason=reason))

    def _close_once_opened(self, running: Running, reason: str) -> None:
        """Have an environment closed whose open is being stopped, should the node have opened it before it hears of that."""
        environment = self.state.environments.get(running.waiting.action.environment or "")
        if environment is not None and environment.state == "opening":
            environment.close_requested = reason

    def _drop_waiting(self, waiting: Waiting, status: End, reason: str, now: float) -> None:
        """End a waiting action, wherever it waits."""
        state, action = self.state, waiting.action
        environment = state.environments.get(action.environment or "")
        if action.kind == "cpu.open" and environment is not None:
            state.opens.remove(waiting)
            state.finish_waiting(waiting, status, reason, now)
            self._environments.forget(environment, reason, now)
            self._environments.place(now)
            return
        if environment is not None:
            self._environments.unqueue(waiting, environment, now)
        else:
            removed = any(queue.remove(waiting) for queue in (state.floating_cells, state.floating_cores, state.unplaced))
            if not removed and action.cost.quotas:
                state.quotas[action.cost.quotas[0]].queue.remove(waiting)
        self._touch_queue_of(waiting, environment)
        state.finish_waiting(waiting, status, reason, now)

    def _touch_queue_of(self, waiting: Waiting, environment: Environment | None) -> None:
        """Look again at the groups that the action may have held up from the head of a queue."""
        if environment is not None and environment.node in self.state.nodes:
            self.state.touch(self.state.core_group(environment))
        elif environment is None:
            for node in self.state.nodes.values():
                self.state.touch(node.cells if wants_cells(waiting.action) else node.cores)

    def _tick(self, now: float) -> None:
        state, limits = self.state, self.state.limits
        while state.deadlines and state.deadlines[0][0] <= now:
            _, action_id = heapq.heappop(state.deadlines)
            waiting = state.waiting.get(action_id)
            if waiting is not None:
                waited = f"waited longer than queue_timeout_s = {waiting.action.queue_timeout_s}"
                self._drop_waiting(waiting, "timed_out", waited, now)
        if limits.beat_s is not None:
            self._nodes.miss(limits.beat_s, now)
        state.take_looks(now)
        self._residency.warm_up(now)
        self._environments.end_leases(now)
        self._environments.place(now)
        self._dispatcher.holds.open(now)
        self._dispatcher.look_again(now)
