"""The scheduler's end of the broker: kombu for messages, Celery's backend for results without a worker.

A message that is handed on keeps its body, its properties and its headers. Only the headers that Celery's tools show are written anew. For
Celery it is the same task: `AsyncResult(id)`, chains and Flower go on working. On Redis and in memory, what goes to nodes is put into their
queues in one step (`lying` in `app/broker/messages.py`), which costs less than kombu's producer does for each message.

| the broker is | receiving | sending |
|---|---|---|
| there | what has arrived (`app/broker/redis_intake.py`, `app/broker/amqp_intake.py`) | at once |
| away | nothing; connects again with growing pauses | kept, and sent when it is back |

Nothing here raises because a broker went away: the loop above goes on, renews its lock and waits with it. What was
received and not acknowledged comes again then, and what was sent just before may have been lost or be sent twice;
`lost_connections` says so to whoever has to make up for it.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from celery import Celery
from kombu import Connection, Producer
from kombu.exceptions import OperationalError
from kombu.message import Message
from kombu.utils.json import loads
from kombu.utils.uuid import uuid
from redis import Redis, RedisError

from app.broker import memory
from app.broker.amqp_intake import HEARTBEAT_S, AmqpIntake, sender_heartbeats
from app.broker.messages import action_of, lying, request_of
from app.broker.redis_intake import RedisIntake
from app.broker.stored_ends import disown, stored_end, withdraw
from app.scheduler_document import show_scheduler
from scheduler.live.entries import UnpublishedEnd
from scheduler.live.transport import Received
from scheduler.model.events import StoredEnd
from tangram import clock
from tangram.connection import REDIS_SCHEMES, open_store
from tangram.errors import BY_STATUS, ActionFailed, EnvironmentLost, StackUnreachable
from tangram.kwargsrepr import with_grant
from tangram.life_signs import silences
from tangram.shards import FIRST, exchange_loads
from tangram.wire import (
    BLOB_TTL_S,
    CONTROL_QUEUE,
    EVENTS_QUEUE,
    GRANT_HEADER,
    INGRESS_QUEUE,
    RESULT_KEY_PREFIX,
    RESULT_TTL_S,
    WireLoad,
    claim_key,
    direct_queue,
    node_queue,
    of_shard,
)

log = logging.getLogger(__name__)

MOST_AT_ONCE = 256
"""Messages in one batch: enough that a commit is shared, few enough that the first does not wait for the last."""

_STORING_S = 0.2
"""Longest time for which results are stored at one go: the lease has to be prolonged, and other things wait, too."""

_NOT_KEPT = f"it has ended, and its result is not kept any more: results are kept for {RESULT_TTL_S} s, unless Redis loses them"

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
T = TypeVar("T")
_Sort = Literal["action", "events", "control"]
_SORTS: dict[str, _Sort] = {INGRESS_QUEUE: "action", EVENTS_QUEUE: "events", CONTROL_QUEUE: "control"}


class KombuTransport:
    """A connection of its own for receiving and one for sending; not for use by several threads."""

    def __init__(self, app: Celery, *, connect_timeout_s: float, epoch: int = 1, shard: int = FIRST, shards: int = 1) -> None:
        """Connect, as the scheduler of a shard.

        Raises `StackUnreachable` when the broker does not answer within `connect_timeout_s`; later on it is waited for.
        """
        self._app = app
        self._timeout_s = connect_timeout_s
        self._epoch = epoch
        self._shard, self._shards = shard, shards
        self._sorts = {of_shard(name, shard): sort for name, sort in _SORTS.items()}
        self._read_queues = [direct_queue(name) for name in self._sorts]
        self._control = app.amqp.as_task_v2("", "", ignore_result=True)  # made once, since Celery takes longer for it than a decision takes
        self._outbox: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        self._ends: deque[UnpublishedEnd] = deque()
        self._asked_again: list[str] = []
        self._queues: dict[str, str] = {}
        """The names of the queues that are declared, by node."""
        self._intake: RedisIntake | AmqpIntake | memory.MemoryIntake | None = None
        self._sending: Connection = app.connection_for_write()
        self._errors = _errors_of(self._sending)
        self._was_full = False
        self._intakes = 0
        self._pause_s, self._next_try, self._store_pause_until = _FIRST_PAUSE_S, 0.0, 0.0
        self.lost_connections = 0
        self._lost_at = 0.0
        try:
            self._open()
        except self._errors as error:
            where = self._sending.as_uri()
            self._shut()
            raise StackUnreachable(f"the broker at {where} cannot be reached: {error}") from None

    @property
    def ends_to_store(self) -> int:
        """How many results are still to be stored; those are the latest, as they are stored in the order in which they came."""
        return len(self._ends)

    @property
    def away_s(self) -> float:
        """For how many seconds the broker has been away; 0 while it is there."""
        return 0.0 if self._intake is not None else clock.monotonic() - self._lost_at

    @property
    def caught_up(self) -> bool:
        """Whether the last `receive` brought all that there was: only then is silence of a node a sign."""
        return self._intake is not None and not self._was_full

    def close(self) -> None:
        """Close both connections."""
        self._shut()

    def receive(self, timeout_s: float) -> list[Received]:
        """Return what has arrived, waiting at most `timeout_s` for the first; with results to store, it does not wait."""
        if self._ends and clock.monotonic() >= self._store_pause_until:
            timeout_s = 0.0
        if self._intake is None and not self._try_again(timeout_s):
            return []
        try:
            if isinstance(self._intake, AmqpIntake):
                self._check_sending()
                messages = self._intake.take(timeout_s, MOST_AT_ONCE)
                found = [((message, message.delivery_info["routing_key"]), message) for message in messages]
            else:
                assert self._intake is not None, "it was opened above"
                taken = self._intake.take(timeout_s, MOST_AT_ONCE)
                found = [(self._message_of(one), one) for one in taken]
        except self._errors as error:
            self._lose(error)
            return []
        self._was_full = len(found) >= MOST_AT_ONCE
        read = [self._read(*message, tag) for message, tag in found]
        if unreadable := [one for one in read if not one.id and one.body is None]:
            self.flush(unreadable)
        return [one for one in read if one.id or one.body is not None]

    def send_action(self, node: str, message: str, grant: Mapping[str, Any]) -> None:
        """Buffer a stored message for a node, with the header `grant`."""
        kept = json.loads(message)
        headers = {**kept["headers"], GRANT_HEADER: dict(grant)}
        if "kwargsrepr" in headers:
            headers["kwargsrepr"] = with_grant(headers["kwargsrepr"], grant["node"], grant["units"])
        self._outbox.append((node, kept["body"], headers, kept["properties"]))

    def send_control(self, node: str, task: str, arguments: Mapping[str, Any]) -> None:
        """Buffer a control task for a node; nobody reads its result."""
        task_id, (args, _, embedded) = uuid(), self._control.body
        own = {"task": task, "id": task_id, "root_id": task_id, "kwargsrepr": f"{dict(arguments)!r:.1024}"}
        properties = {"content_type": "application/json", "content_encoding": "utf-8", "reply_to": "", "correlation_id": task_id}
        self._outbox.append((node, json.dumps([args, arguments, embedded]), {**self._control.headers, **own}, properties))

    def store_end(self, end: UnpublishedEnd) -> None:
        """Buffer the result of an action that ends without a worker."""
        self._ends.append(end)

    def tell_lost(self, action_id: str) -> None:
        """Buffer that an action has ended and is asked for again: where its result is not kept any more, that becomes its result."""
        self._asked_again.append(action_id)

    def stored_ends(self, kinds: Mapping[str, str], give_up: Mapping[str, int] = MappingProxyType({})) -> list[StoredEnd] | None:
        """Return the ends of those of these actions, kinds by id, whose workers have stored a result; see the protocol."""
        if not kinds:
            return []

        def ask(store: Redis) -> list[Any]:
            with store.pipeline() as pipe:
                disown(pipe, give_up.items())
                pipe.mget([RESULT_KEY_PREFIX + action_id for action_id in kinds])
                found: list[Any] = pipe.execute()[-1]
                return found

        raws = self._ask_store(ask)
        if raws is None:
            return None
        found = [stored_end(action_id, kind, raw) for (action_id, kind), raw in zip(kinds.items(), raws, strict=True)]
        return [end for end in found if end is not None]

    def claimed(self, tries: Mapping[str, int]) -> set[str] | None:
        """Return those of these tries that a worker has claimed; see the protocol."""
        keys = [claim_key(*one) for one in tries.items()]
        claims: list[Any] | None = self._ask_store(lambda store: store.mget(keys)) if tries else []
        return None if claims is None else {action_id for action_id, claim in zip(tries, claims, strict=True) if claim is not None}

    def withdraw(self, action_id: str, attempt: int) -> bool:
        """Disown a try that nobody has claimed, and return whether that was so; see the protocol."""
        return self._ask_store(lambda store: withdraw(store, (action_id, attempt))) is True

    def silences(self, clients: Sequence[str]) -> Mapping[str, float | None] | None:
        """Return for how long clients have been silent; see the protocol."""
        return self._ask_store(lambda store: silences(store, clients))

    def flush(self, received: Sequence[Received] = ()) -> None:
        """Send and store what was buffered, and tell the broker that `received` need not come again; what cannot be now stays for later."""
        if self._intake is not None and (self._outbox or received):
            tags = [one.tag for one in received]
            try:
                if isinstance(self._intake, AmqpIntake):
                    for node, body, headers, properties in self._outbox:
                        self._producer.publish(body, exchange="", routing_key=self._queue_of(node), headers=headers, **properties)
                    self._outbox.clear()
                    self._intake.acknowledge(tags)
                else:
                    messages = defaultdict[str, list[bytes]](list)
                    for node, body, headers, properties in self._outbox:
                        messages[queue := self._queue_of(node)].append(lying(queue, body, headers, properties))
                    self._intake.settle(messages, tags)
                    self._outbox.clear()
            except self._errors as error:
                self._lose(error)
        if (self._ends or self._asked_again) and clock.monotonic() >= self._store_pause_until:
            self._store_ends()

    def show(self, figures: Mapping[str, Any]) -> None:
        """Keep the scheduler's figures where tools look for them."""
        self._ask_store(lambda store: show_scheduler(store, self._shard, self._shards, figures))

    def exchange(self, load: WireLoad) -> Sequence[WireLoad] | None:
        """Say what this shard carries, and return what the others said last; see the protocol."""
        return self._ask_store(lambda store: exchange_loads(store, self._shard, self._shards, load))

    # The connections

    def _open(self) -> None:
        """Open both connections. Raises one of `_errors`."""
        self._queues.clear()
        self._sending = self._app.connection_for_write(heartbeat=HEARTBEAT_S)
        self._sending.ensure_connection(max_retries=1, interval_start=0, timeout=self._timeout_s)
        self._channel = self._sending.channel()
        for queue in self._read_queues:
            queue(self._channel).declare()
        self._producer = Producer(self._channel)
        self._check_sending = sender_heartbeats(self._sending)
        url = str(self._app.conf.broker_read_url or self._app.conf.broker_url)
        names = list(self._sorts)
        if urlsplit(url).scheme == memory.SCHEME:
            self._intake = memory.MemoryIntake(self._app.conf.broker_transport_options["broker"], names, self._epoch, self._intakes)
            self._intakes += 1
        elif urlsplit(url).scheme in REDIS_SCHEMES:
            pool = open_store(url, self._timeout_s).connection_pool
            self._intake = RedisIntake(pool, names, self._epoch, self._intakes, self._shard)
            self._intakes += 1
        else:
            connection = self._app.connection_for_read(heartbeat=HEARTBEAT_S)
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=self._timeout_s)
            self._intake = AmqpIntake(connection, self._read_queues, MOST_AT_ONCE)

    def _shut(self) -> None:
        intake, self._intake = self._intake, None
        for close in ([intake.close] if intake is not None else []) + [self._sending.release]:
            try:
                close()
            except self._errors as error:
                log.debug("closing a connection that is broken: %s", error)

    def _lose(self, error: BaseException) -> None:
        """Give up both connections, which live and die together; `receive` opens them again."""
        log.warning("lost the broker at %s: %s; connecting again", self._sending.as_uri(), error)
        self._shut()
        self.lost_connections += 1
        self._lost_at = clock.monotonic()
        self._pause_s = _FIRST_PAUSE_S
        self._next_try = clock.monotonic() + self._pause_s

    def _try_again(self, timeout_s: float) -> bool:
        pause_s = self._next_try - clock.monotonic()
        if pause_s > 0:
            clock.sleep(max(0.0, min(pause_s, timeout_s)))
        if clock.monotonic() < self._next_try:
            return False
        try:
            self._open()
        except self._errors as error:
            log.info("the broker is still away: %s", error)
            self._shut()
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._next_try = clock.monotonic() + self._pause_s
            return False
        log.warning("the broker is back")
        return True

    def _queue_of(self, node: str) -> str:
        """Return the name of a node's queue, which is declared first."""
        if node not in self._queues:
            queue = direct_queue(node_queue(node))
            queue(self._channel).declare()
            self._queues[node] = queue.name
        return self._queues[node]

    # What was received

    def _message_of(self, taken: tuple[str, bytes]) -> tuple[Message | None, str]:
        """Read what lies on Redis, in a list of taken messages, or in memory."""
        name, raw = taken
        queue = name.rpartition(":")[2]
        try:
            return self._channel.Message(loads(raw.decode()), channel=self._channel, accept={"application/json"}), queue
        except Exception as error:
            # Whatever is wrong with it lies in the message: a stranger may write to the queue, and the loop must go on.
            _say_dropped(queue, error)
            return None, queue

    def _read(self, message: Message | None, queue: str, tag: Any) -> Received:
        """Read a message; one that cannot be read has neither id nor body."""
        sort = self._sorts[queue]
        try:
            if message is None:
                return Received(sort=sort, tag=tag)
            return action_of(message, tag) if sort == "action" else Received(sort=sort, body=message.decode(), tag=tag)
        except Exception as error:
            # As above: decoders raise what they like.
            _say_dropped(queue, error)
            return Received(sort=sort, tag=tag)

    def keep_blobs(self, keys: Sequence[str], for_s: int = BLOB_TTL_S) -> None:
        """Have blobs live on; see the protocol."""
        try:
            with self._app.backend.client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.expire(key, for_s)
                pipe.execute()
        except (RedisError, OSError) as error:
            log.warning("%d large arguments live on as they did: %s", len(keys), error)

    # Results of actions that end without a worker

    def _store_ends(self) -> None:
        try:
            until = clock.monotonic() + _STORING_S
            while self._ends and clock.monotonic() < until:
                self._store(self._ends[0])
                self._ends.popleft()
            # What is still to be stored above may be what is asked for.
            while self._asked_again and not self._ends and clock.monotonic() < until:
                # It is refused where a result is kept. Callbacks were sent when the action ended.
                self._app.backend.store_result(self._asked_again[-1], ActionFailed(_NOT_KEPT, "result_lost"), "FAILURE")
                self._asked_again.pop()
        except self._errors as error:  # the broker's too: callbacks go out over it
            self._pause_store(error)

    def _ask_store(self, ask: Callable[[Redis], T]) -> T | None:
        """Return what the store answers to `ask`; None while it is away."""
        if clock.monotonic() < self._store_pause_until:
            return None
        try:
            return ask(self._app.backend.client)
        except (RedisError, OSError) as error:
            self._pause_store(error)
            return None

    def _pause_store(self, error: BaseException) -> None:
        log.warning("the result store does not answer: %s", error)
        self._store_pause_until = clock.monotonic() + _LONGEST_PAUSE_S

    def _store(self, end: UnpublishedEnd) -> None:
        backend = self._app.backend
        if end.status == "succeeded":
            act = {"queue_s": 0.0, "background_s": 0.0, "overhead_s": 0.0, "execution_s": 0.0}
            payload = {"status": end.status, "value": None, "reason": end.reason, "cause": end.cause, "dop": 0, "act": act}
            backend.store_result(end.id, payload, "SUCCESS")
            return
        lost = EnvironmentLost(end.reason, on, end.cause or "environment_lost") if (on := end.environment_lost_on) else None
        error = lost or BY_STATUS.get(end.status, ActionFailed)(end.reason, end.cause)
        try:
            backend.mark_as_failure(end.id, error, request=request_of(end.message))
        except Exception as problem:
            # Callbacks are the sender's words: wrong ones must keep neither this result from being stored nor those after it.
            # Some that cannot be sent look like a broken connection, as kombu says of them.
            if isinstance(problem, self._errors):
                self._check_all_is_there()
            log.warning("callbacks of action %s cannot be sent: %s: %s", end.id, type(problem).__name__, problem)
            backend.store_result(end.id, error, "FAILURE")

    def _check_all_is_there(self) -> None:
        """Raise one of `_errors` while the store or the broker is away."""
        self._app.backend.client.ping()
        with self._app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=self._timeout_s)


def _errors_of(connection: Connection) -> tuple[type[BaseException], ...]:
    """Return what a broken connection raises; kombu counts KeyError among it, which would hide mistakes of ours."""
    known = {*connection.connection_errors, *connection.channel_errors, OperationalError, RedisError, OSError}
    return tuple(error for error in known if error is not KeyError)


def _say_dropped(queue: str, error: Exception) -> None:
    log.warning("a message on %s cannot be read and is dropped: %s: %s", queue, type(error).__name__, error)
