"""The live driver: the same `Core` as in simulation, between a broker, a journal and a clock.

One thread, one loop, a batch at a time:

1. Receive what is there: actions, reports of workers, wishes of trainers.
2. Hand each to the core as an event; its commands become journal entries and outgoing messages.
3. Commit the entries as one group; only then send; acknowledge what was received last.

So an action that was acknowledged is in SQL, and an action that was started is in SQL as started. The busier the
system, the larger the batches, the fewer the commits. When the process dies between two of these steps, the broker
hands out what was not acknowledged again, and duplicates are known by their task id.

Of this package only this module reads a clock; the broker, Celery and SQL are behind the protocols `Transport` and
`Journal`. What follows from the core's commands is in `orders.py`, what follows from the nodes' beats in `roll_call.py`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from scheduler import commands, events, reports
from scheduler.clients import Clients
from scheduler.core import Core
from scheduler.entries import Journal, UnfinishedAction
from scheduler.event_log import EventLog
from scheduler.model import Grant
from scheduler.orders import REMEMBERED_ENDS, Orders
from scheduler.roll_call import HOUSEKEEPING_S, RollCall
from scheduler.stats import summary
from scheduler.transport import Received, Transport
from tangram.action import Action
from tangram.errors import InvalidAction
from tangram.wire import ACTION_HEADER, BLOB_TTL_S

log = logging.getLogger(__name__)

REMEMBERED_DECISIONS = 20_000
"""Decisions over which the percentiles of their times are taken."""


class CoreBroken(RuntimeError):
    """Raised when the core fails on an event, or what it decided cannot be carried out: its state is not to be trusted any more.

    What was received is not acknowledged, so the scheduler that takes over begins with the journal and gets it again.
    """


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
    ) -> None:
        self._core = core
        self._transport = transport
        self._journal = journal
        self._epoch = epoch
        self._clock = clock
        self._still_leading = still_leading
        self._orders = Orders(core, transport, journal, epoch)
        self._event_log = event_log
        now = clock()
        self._roll_call = RollCall(core, transport, self._orders, self._handle, now)
        self._clients = Clients(core.state, transport, self._handle, orphan_s, now)
        self._next_housekeeping = self._keep_blobs_at = 0.0
        self._decision_us: deque[float] = deque(maxlen=REMEMBERED_DECISIONS)

    def recover(self) -> int:
        """Go on where the scheduler before this one stopped; return the number of unfinished actions."""
        unfinished, now = self._journal.unfinished(), self._clock()
        self._orders.ended.update(dict.fromkeys(unfinished.ended[-REMEMBERED_ENDS:]))
        for end in unfinished.untold:
            self._orders.tell(end)
        for gone in unfinished.gone:
            self._handle(gone, now)
        for node in unfinished.nodes:
            self._roll_call.resume(node.name, node.description, now)
        for kept in unfinished.environments:
            if kept.node is not None and kept.state in ("open", "closing"):
                opened = events.EnvironmentOpened(
                    id=kept.id,
                    node=kept.node,
                    job=kept.job,
                    trajectory=kept.trajectory,
                    memory_mb=kept.memory_mb,
                    client=kept.client,
                    used_at=kept.used_at,
                    closing=kept.reason if kept.state == "closing" else "",
                )
                self._handle(opened, now)
        for spent in unfinished.spent:
            self._handle(events.Spent(action=Action.from_header(spent.header), at=spent.granted_at), now)
        # What holds units already takes them up before what waits could be given them.
        for kept_action in sorted(unfinished.actions, key=lambda one: one.grant is None):
            self._resume(kept_action, now)
        self._roll_call.repeat_orders()  # the journal knows what the one before decided, which may have died before it told anybody
        self._commit([])
        return len(unfinished.actions)

    def _resume(self, kept: UnfinishedAction, now: float) -> None:
        self._orders.keep(kept.id, kept.message, kept.submitted_at, _blobs_of(kept.message))
        action, grant = Action.from_header(kept.header), kept.grant
        if grant is None:
            submitted = events.Submitted(
                id=kept.id, action=action, submitted_at=kept.submitted_at, received_at=kept.received_at, attempt=kept.attempts
            )
            self._handle(submitted, now)
            return
        self._orders.granted[kept.id] = grant.attempt
        resumed = events.Resumed(
            id=kept.id,
            action=action,
            submitted_at=kept.submitted_at,
            received_at=kept.received_at,
            granted_at=grant.granted_at,
            grant=Grant(
                node=grant.node,
                attempt=grant.attempt,
                units=grant.units,
                core_ids=grant.core_ids,
                background=grant.background,
                cell_ids=grant.cell_ids,
            ),
            resized_at=kept.resized_at,
        )
        self._handle(resumed, now)

    def step(self) -> bool:
        """Deal with one batch; return False once another scheduler leads."""
        now = self._clock()
        wake = self._core.next_wake(now)
        until = min(self._next_housekeeping, wake if wake is not None else self._next_housekeeping)
        batch = self._transport.receive(max(0.0, min(until - now, HOUSEKEEPING_S)))
        now = self._clock()
        housekeeping = now >= self._next_housekeeping
        if housekeeping and not self._still_leading():
            return False
        # Wishes last: a cancel that came with the submissions it is about, or overtook them, must find them.
        for received in sorted(batch, key=lambda one: one.sort == "control"):
            self._take(received, now)
        if housekeeping or (wake is not None and wake <= now):
            self._roll_call.excuse(now)
            self._roll_call.lose_the_silent(now)
            self._handle(events.Tick(), now)
        if housekeeping:
            self._next_housekeeping = now + HOUSEKEEPING_S
            self._roll_call.forget_the_gone()
            self._clients.look(now)
            if now >= self._keep_blobs_at:
                self._keep_blobs_at = now + BLOB_TTL_S / 4
                self._orders.keep_blobs()
            self._show()
        self._commit(batch)
        return True

    def finish(self) -> None:
        """Write down what was told last, so that the next scheduler does not tell it once more, and send its callbacks twice."""
        self._orders.write()

    def _commit(self, batch: Sequence[Received]) -> None:
        self._orders.commit(batch)
        if self._event_log is not None:
            self._event_log.flush()

    def _take(self, received: Received, now: float) -> None:
        """Read a message, and hand over what makes sense of it. What does not is refused; what fails after that is ours."""
        if received.sort == "action":
            if received.id:
                self._take_action(received, now)
        elif received.sort == "events":
            for said in reports.read_all(received.body):
                self._take_report(said, now)
        elif (wish := reports.read_wish(received.body)) is not None:
            ids, job, trajectory = tuple(wish.ids), wish.job, wish.trajectory
            self._handle(events.Cancelled(ids=ids, job=job, trajectory=trajectory), now)

    def _take_action(self, received: Received, now: float) -> None:
        if self._orders.knows(received.id):
            return
        described = isinstance(received.header, Mapping)
        header = dict(received.header) if isinstance(received.header, Mapping) else {}
        submitted_at = header.pop("submitted_at", now)
        if isinstance(submitted_at, bool) or not isinstance(submitted_at, (int, float)) or not now - 86_400 <= submitted_at <= now:
            submitted_at = now
        blobs = header.pop("blobs", ())
        self._orders.keep(received.id, received.message, submitted_at, blobs if isinstance(blobs, list) else ())
        try:
            if not described:
                raise InvalidAction(
                    received.task, "the message does not describe its action: send it with `tangram.Client` or `app.routing`"
                )
            if header.get("kind") != received.task:
                raise InvalidAction("kind", f"the message is for the task {received.task!r}, its header says {header.get('kind')!r}")
            action = Action.from_header(header)
        except (InvalidAction, TypeError) as error:
            self._refuse_unreadable(received, str(error), submitted_at, now)
            return
        self._orders.note_received(received.id, action, now)
        self._handle(events.Submitted(id=received.id, action=action, submitted_at=submitted_at), now)

    def _refuse_unreadable(self, received: Received, problem: str, submitted_at: float, now: float) -> None:
        """End an action whose header cannot be understood, with all the ceremony of one that can."""
        self._orders.note_received(received.id, Action(kind="unreadable"), now)
        refused = commands.Finish(
            id=received.id,
            status="rejected",
            reason=f"header {ACTION_HEADER}: {problem}",
            by_worker=False,
            started_at=None,
            queue_s=0.0,
            overhead_s=now - submitted_at,
            execution_s=0.0,
            cpu_s=0.0,
            dop=0,
        )
        self._orders.carry_out(refused, now)

    def _take_report(self, said: reports.Report, now: float) -> None:
        match said:
            case reports.Finished():
                self._handle(said.event(), now)
            case reports.Started():
                self._handle(events.Started(id=said.id, attempt=said.attempt, at=said.at), now)
            case reports.Sent():
                self._handle(events.Sent(id=said.id, attempt=said.attempt, at=said.at), now)
            case reports.Used():
                self._handle(events.Used(id=said.id, attempt=said.attempt, background_cpu_s=said.background_cpu_s), now)
            case reports.Beat():
                self._roll_call.take_beat(said.node, now)
            case reports.ServiceChanged():
                self._roll_call.instances.changed(said.node, said.instance, now)
            case reports.Unknown():
                self._roll_call.answer_unknown(said.id, said.attempt, now)
            case reports.Left():
                self._roll_call.lose(said.name, "its worker was stopped", now, left=True)

    def _handle(self, event: events.Event, now: float) -> None:
        before, began = self._core.decisions, time.perf_counter()
        try:
            out = self._core.handle(event, now)
        except Exception as error:
            raise CoreBroken(f"the core failed on {type(event).__name__}") from error
        if self._core.decisions != before:
            self._decision_us.append((time.perf_counter() - began) * 1e6)
        if self._event_log is not None:
            self._event_log.handled(event, now, out)
        try:
            for command in out:
                self._orders.carry_out(command, now)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CoreBroken(f"what the core decided on {type(event).__name__} could not be carried out") from error

    def _show(self) -> None:
        state, orders = self._core.state, self._orders
        decision_us, error = summary(self._decision_us), state.durations.error()
        self._transport.show(
            {
                "policy": state.policy.name,
                "epoch": self._epoch,
                "waiting": len(state.waiting),
                "running": len(state.running),
                "decisions": self._core.decisions,
                "resizes": orders.resizes,
                "restores": orders.restores,
                "decision_us_p50": decision_us.p50,
                "decision_us_p99": decision_us.p99,
                "predictions": error.predictions,
                "prediction_factor_p50": error.factor_p50,
                "prediction_factor_p90": error.factor_p90,
            }
        )


def _blobs_of(message: str) -> Sequence[object]:
    """Return the blobs that a kept message refers to."""
    if '"blobs"' not in message:
        return ()
    blobs = json.loads(message).get("headers", {}).get(ACTION_HEADER, {}).get("blobs", ())
    return blobs if isinstance(blobs, list) else ()
