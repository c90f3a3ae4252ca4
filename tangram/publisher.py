"""The one thread and the one broker connection that carry everything a client sends.

Callers only append to a queue, so nobody waits for the network: not an event loop, not 2,000 coroutines that submit in
the same millisecond. The thread takes what has gathered and sends it as one batch, in order: on Redis one pipeline.

A large value goes to the result store in parts, before its message. Between two parts of bytes or text, what does not depend on them
overtakes them: actions of other environments, and requests for other tasks. All else keeps its order.

| a batch | then |
|---|---|
| is sent | done |
| meets an error of broker or store | is sent again on a new connection; ids make repeats harmless |
| has a message that is unsent for `outage_s` | its action ends with `StackUnreachable`, or with `Unknown` where the broker may have it |
| has a message that is `lasting` | that is kept until it is sent: it undoes what was given up |
| holds arguments that are no JSON | that action ends with `InvalidAction`, the others are sent |
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

from celery import Celery
from kombu import Connection, Producer
from kombu.exceptions import EncodeError
from redis import Redis, RedisError

from tangram import clock
from tangram.action import KINDS, Action
from tangram.blobs import PART_BYTES, Blobs, keys_of
from tangram.connection import show
from tangram.errors import InvalidAction, StackUnreachable
from tangram.inbox import Inbox, firm_future
from tangram.kwargsrepr import kwargsrepr
from tangram.rabbitmq import break_where_blocked
from tangram.settings import Settings
from tangram.shards import FIRST
from tangram.tracing import ActionSpan
from tangram.wire import ACTION_HEADER, CONTROL_QUEUE, INGRESS_QUEUE, RESULT_KEY_PREFIX, direct_queue, of_shard

_QUEUES = (INGRESS_QUEUE, CONTROL_QUEUE)
_BATCH = 256
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_LATER_S = 5.0
"""After how long what is lasting is tried again."""
_PAUSES = {"interval_start": _PAUSE_S, "interval_step": _PAUSE_S, "interval_max": _LONGEST_PAUSE_S}

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Submission:
    """One action on its way out, to its `shard`; `submitted_at` is seconds since the epoch.

    One that is sent `once` may have been sent before, by whoever knows its id: it is not sent where the store has its result. One that
    this client sends `again`, since the broker may have lost it, says so in its header. One that is `lasting` is never given up.
    """

    task_id: str
    action: Action
    shard: int = FIRST
    once: bool = False
    submitted_at: float = field(default_factory=lambda: clock.time())
    packed: dict[str, Any] | None = None
    span: ActionSpan | None = None
    again: bool = False
    lasting: bool = False
    given: float = field(default_factory=lambda: clock.monotonic())

    def repeated(self) -> Submission:
        """Return the submission to be sent again."""
        return replace(self, span=None, again=True, given=clock.monotonic())


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """One message for the scheduler's control queue; `sent` is done once the broker has it, or fails with `StackUnreachable`.

    It goes to one `shard`, or to all. A cancel of single tasks that cannot be sent gives them up, so that nobody waits for an end that
    nobody brings about. One that is `lasting` is kept until it can be sent.
    """

    body: Mapping[str, Any]
    task_ids: tuple[str, ...] = ()
    sent: Future[None] = field(default_factory=firm_future)
    lasting: bool = False
    shard: int | None = None
    given: float = field(default_factory=lambda: clock.monotonic())

    def named(self) -> set[str] | None:
        """Return the tasks that it is about; None where it ends all of a trajectory or a job."""
        if "cancel" in self.body:
            return None if "job" in self.body["cancel"] else set(self.body["cancel"]["ids"])
        return {self.body["give"]["id"]} if "give" in self.body else set()


Message = Submission | ControlRequest


class _Stop:
    """Told to the thread last."""


_NOTHING: Message | _Stop = ControlRequest({})


class Publisher:
    """Sends submissions and control requests, in the order in which they were given to `send`."""

    def __init__(self, app: Celery, store: Redis, inbox: Inbox, client_id: str, settings: Settings) -> None:
        """Prepare; `start` begins. What cannot be sent for `outage_s` fails in `inbox`."""
        outage_s = settings.outage_s
        self._ingress, self._control = ([direct_queue(of_shard(name, shard)) for shard in range(settings.shards)] for name in _QUEUES)
        self._app = app
        self._client_id = client_id
        self._store = store
        self._blobs = Blobs(store, patience_s=outage_s)
        self._overtaken = Blobs(store, patience_s=outage_s, between_parts=self._let_overtake)
        """For this thread alone, and never within a batch."""
        self._outage_s = outage_s
        self._waiting: list[Message] = []
        """The message whose large value is on its way, and what must not overtake it."""
        self._kept: list[Message] = []
        """What is lasting, and could not be sent yet."""
        self._inbox = inbox
        self._connect_timeout_s = settings.connect_timeout_s
        self._queue: SimpleQueue[Message | _Stop] = clock.fifo()
        self._stopping = clock.event()
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._thread = clock.thread(self._run, "tangram-publish")
        self.ready: Future[None] = firm_future()
        """Done once the broker answered; fails with `StackUnreachable` if it did not in time."""

    def start(self) -> None:
        """Begin to connect and to send."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send `message` soon; never blocks."""
        self._queue.put(message)

    def wait_for(self, control: ControlRequest) -> None:
        """Return once the broker has a message; at once in this publisher's own thread, which runs callbacks of failures."""
        if not clock.runs_in(self._thread):
            clock.wait((control.sent,))
            control.sent.result()

    def stop(self, timeout_s: float) -> None:
        """Send what was given so far and end, waiting at most `timeout_s`."""
        self._queue.put(_Stop())
        # The last reference to a client may die in this very thread, with the callback of a failure.
        if self._thread.is_alive() and not clock.runs_in(self._thread):
            self._thread.join(timeout_s)
        self._stopping.set()
        self._blobs.close()
        self._overtaken.close()

    def _run(self) -> None:
        try:
            self._connect()
        except Exception as error:
            # Every transport has errors of its own; at first contact they all mean the same.
            self._disconnect()
            self.ready.set_exception(self._unreachable(error))
            return
        self.ready.set_result(None)
        going = True
        while going:
            batch, going = self._gather()
            while batch:
                at_once, self._waiting = _divided(batch)
                self._send(at_once)
                self._send(self._waiting[:1])
                batch, self._waiting = self._waiting[1:], []
        self._disconnect()

    def _gather(self) -> tuple[list[Message], bool]:
        """Wait for something to send and take all that has gathered, up to a batch; say whether to go on after it."""
        batch, self._kept = self._kept, []
        message = _NOTHING
        with contextlib.suppress(Empty):
            message = self._queue.get(timeout=_LATER_S if batch else None)
            while not isinstance(message, _Stop):
                batch.append(message)
                if len(batch) >= _BATCH:
                    return batch, True
                message = self._queue.get_nowait()
        return batch, not isinstance(message, _Stop)

    def _let_overtake(self) -> None:
        """Send what has come meanwhile and may overtake a large value that is on its way."""
        if not self._waiting:
            return
        came = list[Message]()
        with contextlib.suppress(Empty):
            while not isinstance(message := self._queue.get_nowait(), _Stop):
                came.append(message)
            self._queue.put(message)
        at_once, self._waiting = _divided(came, self._waiting)
        self._send(at_once)

    def _send(self, batch: list[Message]) -> None:
        if not batch:
            return
        pause_s = _PAUSE_S
        while True:
            try:
                self._publish(batch)
                break
            except Exception as error:
                # Transports raise what they like when a connection breaks; the age of messages bounds what is tried in vain.
                self._disconnect()
                too_old = math.inf if self._stopping.is_set() else clock.monotonic() - self._outage_s
                self._kept += [message for message in batch if message.lasting]
                self._give_up([message for message in batch if not message.lasting and message.given <= too_old], error)
                batch = [message for message in batch if not message.lasting and message.given > too_old]
                if not batch:
                    return
                _log.warning("sending again after: %s", error)
                self._stopping.wait(random.uniform(0.5, 1.0) * pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        # Outside of the `try`: nothing that goes wrong from here on is a reason to send the batch again.
        for message in batch:
            if isinstance(message, ControlRequest):
                message.sent.set_result(None)
                continue
            self._inbox.note_with_broker(message.task_id)
            if message.span is not None:
                message.span.sent()

    def _publish(self, batch: Sequence[Message]) -> None:
        ended = self._ended([message.task_id for message in batch if isinstance(message, Submission) and message.once])
        first = batch[0]  # a message with a large value is sent alone
        if isinstance(first, Submission) and first.task_id not in ended and _is_large(first):
            with contextlib.suppress(TypeError, ValueError):  # found again below, and told there
                first.packed = self.pack(first.action, blobs=self._overtaken)
        producer = self._producer or self._connect()
        with producer.batch():
            for message in batch:
                if isinstance(message, ControlRequest):
                    for queue in self._control if message.shard is None else (self._control[message.shard],):
                        producer.publish(dict(message.body), exchange="", routing_key=queue.name, serializer="json")
                    continue
                if message.task_id in ended or (message.again and self._inbox.waiting_for(message.task_id) is None):
                    continue
                try:
                    self._publish_action(producer, message)
                except (EncodeError, TypeError, ValueError) as error:
                    self._inbox.fail(message.task_id, InvalidAction("arguments", f"cannot be sent as JSON: {error}"))

    def _ended(self, task_ids: list[str]) -> set[str]:
        """Hand on the results of those tasks that were sent before and have ended; return their ids.

        The feed may have handed a result on already.
        """
        if not task_ids:
            return set()
        try:
            raws: list[Any] = self._store.mget([RESULT_KEY_PREFIX + task_id for task_id in task_ids])
        except RedisError as error:
            raise StackUnreachable(f"the result store is unreachable: {error}") from error
        for task_id, raw in zip(task_ids, raws, strict=True):
            if isinstance(raw, bytes):
                self._inbox.deliver(task_id, raw)
        return {task_id for task_id in task_ids if self._inbox.waiting_for(task_id) is None}

    def _publish_action(self, producer: Producer, message: Submission) -> None:
        """Send one Celery task message.

        This is the lower half of `Celery.send_task`, called directly: the upper half builds an `AsyncResult`
        that nobody wants, which costs more than all the rest of a batched publish.
        """
        action = message.action
        if message.packed is None or (message.again and self._blobs.are_missing(message.packed.values())):
            message.packed = self.pack(action, message.packed)
        task = self._app.amqp.create_task_message(
            message.task_id, action.kind, (), message.packed, argsrepr="()", kwargsrepr=kwargsrepr(action), ignore_result=False
        )
        described = {**action.to_header(), "client": self._client_id, "submitted_at": message.submitted_at}
        if message.again:
            described["again"] = True
        if keys := keys_of(message.packed.values()):
            described["blobs"] = keys
        header = {ACTION_HEADER: described, **(message.span.headers if message.span is not None else {})}
        self._inbox.note_sent(message.task_id)
        queue = self._ingress[message.shard]
        self._app.amqp.send_task_message(producer, action.kind, task, queue=queue, headers=header, declare=[], retry=False)

    def pack(self, action: Action, before: Mapping[str, Any] | None = None, blobs: Blobs | None = None) -> dict[str, Any]:
        """Move what is large beside the message, to where it was `before`: the message stays the same.

        Tasks that are not ours know nothing of blobs and get what they were given.
        """
        if action.kind not in KINDS:
            return dict(action.arguments)
        try:
            return {name: _packed(blobs or self._blobs, value, (before or {}).get(name)) for name, value in action.arguments.items()}
        except RedisError as error:
            raise StackUnreachable(f"the result store is unreachable: {error}") from error

    def _connect(self) -> Producer:
        connection = self._app.connection_for_write()
        self._connection = connection
        connection.ensure_connection(callback=self._leave_if_stopping, timeout=self._connect_timeout_s, **_PAUSES)
        break_where_blocked(connection)
        channel = connection.default_channel
        for queue in (*self._ingress, *self._control):
            queue(channel).declare()
        self._producer = Producer(channel, serializer="json", auto_declare=False)
        return self._producer

    def _leave_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise StackUnreachable("the client is closed")

    def _disconnect(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                # It is given up anyway, mostly because it broke.
                connection.release()

    def _give_up(self, batch: Sequence[Message], error: Exception) -> None:
        if batch:
            _log.error("%d messages could not be sent: %s", len(batch), error)
        for message in batch:
            if isinstance(message, ControlRequest):
                message.sent.set_exception(self._unreachable(error))
                for task_id in message.task_ids:
                    self._inbox.give_up(task_id, f"its cancel could not be sent: {self._unreachable(error)}")
            elif not message.again:
                self._inbox.give_up(message.task_id, str(self._unreachable(error)))

    def _unreachable(self, error: Exception) -> StackUnreachable:
        if isinstance(error, StackUnreachable):
            return StackUnreachable(str(error))
        return StackUnreachable(f"the broker at {show(str(self._app.conf.broker_url))} is unreachable: {error}")


def _packed(blobs: Blobs, value: Any, before: object) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return blobs.put(bytes(value), before)
    if isinstance(value, str):
        return blobs.put_text(value, before)
    return blobs.put_json(value, before) if isinstance(value, (list, tuple, dict)) else value


def _is_large(message: Submission) -> bool:
    """Whether its arguments go to the result store in several parts, and have not gone yet."""
    values = () if message.packed is not None or message.action.kind not in KINDS else message.action.arguments.values()
    return any(isinstance(value, (bytes, bytearray, memoryview, str)) and len(value) > PART_BYTES for value in values)


def _divided(batch: Sequence[Message], waiting: Sequence[Message] = ()) -> tuple[list[Message], list[Message]]:
    """Return what of a batch is sent at once, and what waits: for its own large value, or for one of those that wait already."""
    at_once, later = list[Message](), list(waiting)
    environments = {message.action.environment for message in later if isinstance(message, Submission)}
    ids = {message.task_id for message in later if isinstance(message, Submission)}
    waits_all = any(isinstance(message, ControlRequest) and message.named() is None for message in later)
    for message in batch:
        if isinstance(message, Submission):
            of = message.action.environment
            waits = waits_all or _is_large(message) or (of is not None and of in environments)
            if waits:
                environments.add(of)
                ids.add(message.task_id)
        else:
            named = message.named()
            waits = waits_all or (bool(later) if named is None else bool(named & ids))
            waits_all = waits_all or (waits and named is None)
        (later if waits else at_once).append(message)
    return at_once, later
