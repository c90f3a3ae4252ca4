"""The live driver: the same `Core` as in simulation, between a broker, a journal and a clock.

One thread, one loop, a batch at a time:

1. Receive the waiting messages: actions, reports of workers, control requests of trainers.
2. Hand each message to the core as an event; its commands become journal entries and outgoing messages.
3. Commit the entries as one group. Only then send. Acknowledge the received messages last.

So every acknowledged action is in SQL, and every started action is in SQL as started. The busier the system, the larger the
batches, the fewer the commits. If the process dies between two steps, the broker delivers the messages without acknowledgement
again. Duplicates are known by their task id.

Only this module of the package reads a clock. The broker, Celery and SQL are behind the protocols `Transport` and `Journal`.
`command_executor.py` carries out the core's commands. `heartbeats.py` takes the nodes' beats, and `requests.py` the control
requests. `poison.py` handles messages on which schedulers fail.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from scheduler.core.core import Core
from scheduler.live import poison, reports
from scheduler.live.clients import Clients
from scheduler.live.command_executor import CommandExecutor
from scheduler.live.descriptions import awaited_services
from scheduler.live.document import queues_and_shares
from scheduler.live.entries import (
    EnvironmentChanged,
    Journal,
    NodeChanged,
    SetAside,
    SpentAction,
    Unfinished,
    UnfinishedAction,
    UnpublishedEnd,
)
from scheduler.live.event_log import EventLog
from scheduler.live.heartbeats import HOUSEKEEPING_S, Heartbeats
from scheduler.live.observer import Observer
from scheduler.live.peers import Peers
from scheduler.live.poison import CoreBroken, Quarantine
from scheduler.live.requests import Requests
from scheduler.live.submissions import UNREADABLE, action_of, blobs_of, blobs_of_kept, is_repeated, submitted_at
from scheduler.live.transport import Received, Transport
from scheduler.model import commands, events
from scheduler.model.copied import filled
from scheduler.model.lifecycle import ENVIRONMENT, NODE, End, InvalidTransition
from scheduler.model.stats import summary
from tangram.action import Action
from tangram.ends import cause_of
from tangram.errors import InvalidAction, StackUnreachable
from tangram.wire import ACTION_HEADER, BLOB_TTL_S, LONGEST_ID

REMEMBERED_DECISIONS = 20_000
"""Number of last decisions for the percentiles of their durations."""


class Service:
    """One active scheduler."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        journal: Journal,
        *,
        epoch: int = 1,
        clock: Callable[[], float] = time.time,
        still_leading: Callable[[], bool] = lambda: True,
        orphan_s: float = 0.0,
        event_log: EventLog | None = None,
        observer: Observer | None = None,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """Schedule the nodes of a `shard`, of so many."""
        self._core = core
        self._observer = observer
        self._transport = transport
        self._journal = journal
        self._epoch = epoch
        self._clock = clock
        self._still_leading = still_leading
        self._executor = CommandExecutor(core, transport, journal, epoch)
        self._event_log = event_log
        now = clock()
        self._heartbeats = Heartbeats(core, transport, self._executor, self._handle, now)
        self._clients = Clients(core.state, transport, self._handle, orphan_s, now)
        self._peers = Peers(core, transport, self._handle, shard, shards)
        self._quarantine = Quarantine(journal, epoch)
        self._requests = Requests(self._executor, self._quarantine, self._handle)
        self._next_housekeeping = self._keep_blobs_at = 0.0
        self._decision_us: deque[float] = deque(maxlen=REMEMBERED_DECISIONS)

    def recover(self) -> int:
        """Go on from the journal of the scheduler before this one; return the number of unfinished actions.

        Raises `StackUnreachable` while the result store does not say which actions have ended that cannot go on. Nothing is done then.
        """
        unfinished, now = self._journal.unfinished(), self._clock()
        self._still_leading()

        def deal(*words: Any) -> None:
            # With many actions this takes long, and a standby must not take that for silence.
            self._still_leading()
            self._quarantine.deal(*words)

        self._quarantine.load(unfinished.set_aside)
        for ended in unfinished.ended:
            self._executor.ended.add(ended)
        for end in unfinished.unpublished:
            self._executor.publish_end(end)
            self._executor.ended.add(end.id)  # its submission may not be acknowledged
        self._executor.environments.update((kept.id, kept.state) for kept in unfinished.environments)
        for gone in unfinished.gone:
            self._handle(gone, now)
        for name in unfinished.draining:
            self._handle(events.NodeDrained(name=name, draining=True), now)
        for node in unfinished.away:
            deal(poison.of_node(node.name, node.description, "reload"), now, partial(self._know_services, node, now))
        for node in unfinished.nodes:
            resume = partial(self._heartbeats.resume, node.name, node.description, now)
            deal(poison.of_node(node.name, node.description, "reload"), now, resume, partial(self._lose_node, node, now))
        self._resume_environments(unfinished, now)
        for spent in unfinished.spent:
            deal(poison.of_content("reload", [spent.granted_at, spent.header]), now, partial(self._resume_spent, spent, now))
        # Running actions take up their units before waiting actions could get them.
        close_requested = {kept.id: (kept.reason, kept.cause) for kept in unfinished.environments if kept.state == "opening"}
        stored = self._give_up_tries(unfinished.actions)
        for kept in sorted(unfinished.actions, key=lambda one: one.grant is None):
            resume = partial(self._resume, kept, close_requested, stored.get(kept.id), now)
            instead = partial(self._end_unfinished, kept, unfinished, stored.get(kept.id), now)
            deal(poison.of_action(kept.id, "reload"), now, resume, instead)
        for renewed in unfinished.leases():
            deal(poison.of_environment(renewed.id), now, partial(self._handle, renewed, now))
        self._tick(now)
        self._heartbeats.resend_commands()  # resizes and stops; `Heartbeats` finds lost grants by asking nodes
        self._commit([])
        return len(unfinished.actions)

    def _know_services(self, node: NodeChanged, now: float) -> None:
        for event in awaited_services(node.name, node.description):
            self._handle(event, now)

    def _resume_spent(self, spent: SpentAction, now: float) -> None:
        self._handle(events.Spent(action=Action.from_header(spent.header), at=spent.granted_at), now)

    def _lose_node(self, node: NodeChanged, now: float, found: SetAside) -> None:
        """Write down that a node is lost because its worker's messages are set aside. The core never hears of this node."""
        self._executor.note(replace(node, state=NODE.next(node.state, "lost"), at=now, reason=poison.reason_of(found)))

    def _resume_environments(self, unfinished: Unfinished, now: float) -> None:
        # Besides those that are set aside, a node is unknown that has joined another shard before it counted as lost here.
        for kept in unfinished.environments:
            if kept.node is None or kept.state not in ("open", "closing"):
                continue
            if kept.node not in self._core.state.nodes:
                self._lose_environment(kept, f"node {kept.node} was lost", now)
                continue
            closing = kept.reason if kept.state == "closing" else ""
            opened = filled(events.EnvironmentOpened, kept, pod_core_ids=unfinished.pods.get(kept.id, ()), closing=closing)
            message, take = poison.of_environment(kept.id), partial(self._handle, opened, now)
            self._quarantine.deal(message, now, take, partial(self._set_environment_aside, kept, now))

    def _set_environment_aside(self, kept: EnvironmentChanged, now: float, found: SetAside) -> None:
        self._lose_environment(kept, poison.reason_of(found), now)

    def _lose_environment(self, kept: EnvironmentChanged, reason: str, now: float) -> None:
        """Write down that an environment is lost. A node that still has it is asked to close it after a beat."""
        self._executor.environments.pop(kept.id, None)
        self._executor.note(replace(kept, state=ENVIRONMENT.next(kept.state, "lost"), at=now, reason=reason))
        self._handle(events.EnvironmentGone(id=kept.id, state="lost", node=kept.node or "", reason=reason, at=now), now)

    def _give_up_tries(self, actions: Iterable[UnfinishedAction]) -> dict[str, events.StoredEnd]:
        """Let no more results count of actions that are set aside or whose node is gone; return the stored ones, by action.

        Raises `StackUnreachable`.
        """
        nodes, kinds, tries = self._core.state.nodes, dict[str, str](), dict[str, int]()
        for kept in actions:
            if kept.grant is not None and (kept.grant.node not in nodes or self._quarantine.holds(poison.of_action(kept.id, "reload"))):
                kinds[kept.id], tries[kept.id] = str(kept.header.get("kind")), kept.grant.attempt
        stored = self._transport.stored_ends(kinds, tries)
        if stored is None:
            raise StackUnreachable("the result store does not say how actions have ended that are set aside or whose node is gone")
        return {end.id: end for end in stored}

    def _resume(
        self, kept: UnfinishedAction, close_requested: Mapping[str, tuple[str, str]], ended: events.StoredEnd | None, now: float
    ) -> None:
        self._executor.keep(kept.id, kept.message, kept.submitted_at, blobs_of_kept(kept.message))
        action, grant = Action.from_header(kept.header), kept.grant
        closing, cause = close_requested.get(action.environment or "", ("", "")) if action.kind == "cpu.open" else ("", "")
        if grant is None:
            self._handle(filled(events.Submitted, kept, action=action, attempt=kept.attempts), now)
            return
        self._executor.granted[kept.id] = grant.attempt
        self._handle(filled(events.Resumed, kept, action=action, close_requested=closing, close_cause=cause, ended=ended), now)

    def _end_unfinished(
        self, kept: UnfinishedAction, unfinished: Unfinished, stored: events.StoredEnd | None, now: float, found: SetAside
    ) -> None:
        """End an action whose message is set aside, and have its node stop it. A stored result of its worker stands."""
        action_id, grant, kind = kept.id, kept.grant, str(kept.header["kind"])
        self._executor.keep(action_id, kept.message, kept.submitted_at)
        if grant is not None:
            self._executor.granted[action_id] = grant.attempt
        if grant is not None and stored is None:
            why = poison.reason_of(found)
            self._executor.stop(commands.Stop(id=action_id, node=grant.node, attempt=grant.attempt, reason=why, cause=poison.CAUSE))
        granted_at = now if kept.granted_at is None else kept.granted_at
        queue_s = max(0.0, granted_at - kept.received_at)
        held_s = max(0.0, now - (kept.resized_at or granted_at))
        background_s, execution_s = (stored.background_s, stored.execution_s) if stored is not None else (0.0, 0.0)
        end = commands.Finish(
            id=action_id,
            status="failed" if stored is None else stored.status,
            reason=poison.reason_of(found) if stored is None else stored.reason,
            by_worker=stored is not None,
            started_at=None,
            queue_s=queue_s,
            background_s=background_s,
            overhead_s=max(0.0, now - kept.submitted_at - queue_s - background_s - execution_s),
            execution_s=execution_s,
            cpu_s=stored.cpu_s if stored is not None else 0.0,
            dop=0 if grant is None else grant.units,
            unit_s=kept.unit_s + (0.0 if grant is None else len(grant.core_ids + grant.cell_ids) * held_s),
            cause=poison.CAUSE if stored is None else cause_of(stored.status, stored.cause),
            kind=kind,
        )
        self._executor.carry_out(end, now)
        for environment in unfinished.environments:
            if kind == "cpu.open" and environment.id == kept.header.get("environment"):
                self._lose_environment(environment, poison.reason_of(found), now)

    def step(self) -> bool:
        """Handle one batch; return False once another scheduler leads."""
        now = self._clock()
        wake = self._core.next_wake(now)
        until = min(self._next_housekeeping, wake if wake is not None else self._next_housekeeping)
        batch = self._transport.receive(max(0.0, min(until - now, HOUSEKEEPING_S)))
        now = self._clock()
        # A clock that was set back must not keep it waiting: nobody else would prolong the lease, or look for silent nodes.
        housekeeping = not 0.0 < self._next_housekeeping - now <= HOUSEKEEPING_S
        if housekeeping and not self._still_leading():
            return False
        # Control requests come last. A cancel must find its submissions, even if it came with or before them.
        for received in sorted(batch, key=lambda one: one.sort == "control"):
            self._take(received, now)
        if housekeeping or (wake is not None and wake <= now):
            self._heartbeats.excuse(now)
            self._heartbeats.judge_silence(now)
            self._tick(now)
        if housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_S
            self._heartbeats.forget_the_gone()
            self._clients.check(now)
            self._executor.drop_blobs()
            if now >= self._keep_blobs_at:
                self._keep_blobs_at = now + BLOB_TTL_S / 4
                self._executor.keep_blobs()
            self._show(now)
            self._peers.exchange(now)
            if self._observer is not None:
                self._observer.looked(self._core, now)
        self._commit(batch)
        return True

    def finish(self) -> None:
        """Write down the results published last. The next scheduler must not send their callbacks again."""
        self._executor.write()

    def _commit(self, batch: Sequence[Received]) -> None:
        self._executor.commit(batch)
        if self._event_log is not None:
            self._event_log.flush()

    def _take(self, received: Received, now: float) -> None:
        """Read a message, and hand over its valid parts. Invalid parts are refused. Later failures are the scheduler's own."""
        if received.sort == "action":
            if len(received.id) > LONGEST_ID or "\0" in received.id:
                self._refuse_id(received)
            elif received.id in self._executor.ended or self._ended_long_ago(received):
                self._transport.tell_lost(received.id)
                self._executor.give_back(blobs_of(received.header))
            elif received.id and not self._executor.knows(received.id):
                take, end = partial(self._take_action, received, now), partial(self._end_received, received, now)
                self._quarantine.deal(poison.of_action(received.id, "action"), now, take, end)
                self._requests.arrived(received.id, now)
            elif is_repeated(received):
                self._executor.asked_again.add(received.id)
        elif received.sort == "events":
            for kind, said in reports.read_all(received.body):
                message = poison.of_report(kind, said, self._executor.descriptions)
                self._quarantine.deal(message, now, partial(self._take_report, said, now))
        else:
            self._requests.take(received.body, now)

    def _ended_long_ago(self, received: Received) -> bool:
        """Whether an action that its client submits again has ended so long ago that only the journal knows it."""
        return is_repeated(received) and not self._executor.knows(received.id) and self._journal.has_ended(received.id)

    def _tick(self, now: float) -> None:
        with self._quarantine.watch(poison.TICK, now):
            self._handle(events.Tick(), now)

    def _refuse_id(self, received: Received) -> None:
        """Store an end for an action whose id the journal could not hold. There is no other record."""
        reason = f"the id of the action has {len(received.id)} characters, {LONGEST_ID} are allowed, and no NUL"
        end = UnpublishedEnd(id=received.id, message=received.message, status="rejected", reason=reason, cause="bad_input")
        self._transport.store_end(end)

    def _take_action(self, received: Received, now: float) -> None:
        self._keep(received, now)
        try:
            action = action_of(received)
        except (InvalidAction, TypeError) as error:
            self._end_unscheduled(received.id, UNREADABLE, "rejected", f"header {ACTION_HEADER}: {error}", "bad_input", now)
            return
        if refusal := self._peers.refusal(action):
            self._end_unscheduled(received.id, action, "rejected", refusal, "bad_input", now)
            return
        self._executor.note_received(received.id, action, now)
        self._handle(events.Submitted(id=received.id, action=action, submitted_at=self._executor.submitted_at[received.id]), now)

    def _keep(self, received: Received, now: float) -> None:
        """Keep the message of an action, with its time of submission and its blobs."""
        self._executor.keep(received.id, received.message, submitted_at(received, now), blobs_of(received.header))

    def _end_received(self, received: Received, now: float, found: SetAside) -> None:
        """End an action whose message is set aside."""
        self._keep(received, now)
        try:
            action = action_of(received)
        except Exception:  # the schedulers before this one may have failed here
            action = UNREADABLE
        self._end_unscheduled(received.id, action, "failed", poison.reason_of(found), poison.CAUSE, now)

    def _end_unscheduled(self, action_id: str, action: Action, status: End, reason: str, cause: str, now: float) -> None:
        """End an action that the core never gets. The journal gets the same entries as for any other action."""
        self._executor.note_received(action_id, action, now)
        end = commands.Finish(
            id=action_id,
            status=status,
            reason=reason,
            by_worker=False,
            started_at=None,
            queue_s=0.0,
            overhead_s=now - self._executor.submitted_at[action_id],
            execution_s=0.0,
            cpu_s=0.0,
            dop=0,
            cause=cause,
            kind=action.kind,
        )
        self._executor.carry_out(end, now)

    def _take_report(self, said: reports.Report, now: float) -> None:
        match said:
            case reports.Finished():
                self._executor.excerpts = {said.event.id: said.excerpt.model_dump() if said.excerpt else None}
                self._handle(said.to(self._epoch), now)
                self._executor.excerpts = {}
            case events.Started() | events.Sent() | events.Used() | events.MemoryWanted():
                self._handle(said, now)
            case reports.Beat():
                self._heartbeats.take_beat(said.node, now)
            case reports.ServiceChanged():
                self._heartbeats.instances.changed(said.node, said.instance, now)
            case reports.Unknown():
                self._heartbeats.answer_unknown(said.id, said.attempt, now, said.at)
            case reports.Left():
                self._heartbeats.leave(said.name, said.incarnation, now)

    def _handle(self, event: events.Event, now: float) -> None:
        before, began = self._core.decisions, time.perf_counter()
        try:
            out = self._core.handle(event, now)
        except Exception as error:
            raise CoreBroken(f"the core failed on {type(event).__name__}") from error
        if self._core.decisions != before:
            took_s = time.perf_counter() - began
            self._decision_us.append(took_s * 1e6)
            if self._observer is not None:
                self._observer.decided(took_s)
        if self._event_log is not None:
            self._event_log.handled(event, now, out)
        try:
            for command in out:
                self._executor.carry_out(command, now)
        except (InvalidTransition, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CoreBroken(f"what the core decided on {type(event).__name__} could not be carried out") from error

    def _show(self, now: float) -> None:
        state, executor = self._core.state, self._executor
        decision_us, error = summary(self._decision_us), state.durations.error()
        self._transport.show(
            {
                "policy": self._core.policy.name,
                "epoch": self._epoch,
                "waiting": len(state.waiting),
                "running": len(state.running),
                "decisions": self._core.decisions,
                "resizes": executor.resizes,
                "restores": executor.restores,
                "decision_us_p50": decision_us.p50,
                "decision_us_p99": decision_us.p99,
                "predictions": error.predictions,
                "prediction_factor_p50": error.factor_p50,
                "prediction_factor_p90": error.factor_p90,
                **queues_and_shares(self._core, self._heartbeats.busy_cores, now),
            }
        )
