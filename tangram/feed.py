"""The one subscription that brings a client all its results.

Celery's Redis backend publishes each result under the key it stores it at, and all task ids of a client begin with the
client's own id: one pattern subscription gets them all, pushed. Published messages are not kept, so what may have
been missed is read from the keys:

| when | then |
|---|---|
| the subscription was confirmed, first or again | the keys of all waiting tasks are read once |
| it was confirmed again | tasks without a result are also submitted again: the server may have come back without what it had |
| a task has had no result for 30 s, and then after twice as long each time | it is submitted again: its message may be lost |
| every `SWEEP_S` | the keys are read; if that finds a result, the subscription is deaf and is made anew |
| the connection breaks | a new one, with growing pauses up to `_LONGEST_PAUSE_S` |
| no connection for `outage_s` | what was sent ends with `Unknown`; trying goes on |

The thread also gives the client's signs of life (`tangram.life_signs`), and looks at what shards carry, first before the client is `ready`.
Only listening lives here: results are made sense of in `tangram.inbox`.
"""

from __future__ import annotations

import contextlib
import logging
import random
from concurrent.futures import Future
from typing import Any

from redis import Redis
from redis.client import PubSub

from tangram import clock
from tangram.errors import StackUnreachable
from tangram.inbox import Inbox, firm_future
from tangram.life_signs import SIGN_S, give_sign
from tangram.settings import Settings
from tangram.shards import Loads
from tangram.wire import RESULT_KEY_PREFIX

SWEEP_S = 30.0

_LISTEN_S = 5.0
_ANSWER_S = 5.0
"""How long the server may take to answer a ping before its subscription counts as deaf."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_KEYS_AT_ONCE = 500
_CLOSING = "closing"
_log = logging.getLogger(__name__)


class Feed:
    """One thread that listens for the results of the client `client_id`, hands them to its inbox, and gives the client's signs of life."""

    def __init__(self, store: Redis, inbox: Inbox, client_id: str, loads: Loads, store_name: str, settings: Settings) -> None:
        """Prepare; `start` begins. `store_name` is the store's address for error messages."""
        self._store = store
        self._inbox = inbox
        self._client_id = client_id
        self._prefix = f"{RESULT_KEY_PREFIX}{client_id}-"
        self._loads = loads
        self._connect_timeout_s = settings.connect_timeout_s
        self._outage_s = settings.outage_s
        self._store_name = store_name
        self._stopping = clock.event()
        self._down_since: float | None = None
        self._thread = clock.thread(self._run, "tangram-feed")
        self.ready: Future[None] = firm_future()
        """Done once the subscription is confirmed; fails with `StackUnreachable` if it is not in time."""

    def start(self) -> None:
        """Begin to listen."""
        self._down_since = clock.monotonic()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread, waiting at most `timeout_s` for it."""
        self._stopping.set()
        if self._down_since is None:
            # The thread sleeps in a read; a message on its own pattern wakes it at once.
            with contextlib.suppress(Exception):
                self._store.publish(self._prefix + _CLOSING, b"")
        # The last reference to a client may die in this very thread, with the callback of a result.
        if self._thread.is_alive() and not clock.runs_in(self._thread):
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                with self._store.pubsub() as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.psubscribe(self._prefix + "*")
                    self._listen(pubsub)
                continue
            except Exception as error:
                # Mostly a RedisError, but redis-py lets others through when a socket breaks under it: none ends the feed.
                if self._stopping.is_set():
                    return
                if self._down_since is None:
                    self._down_since, pause_s = clock.monotonic(), _FIRST_PAUSE_S
                    _log.warning("lost the result store at %s, connecting again: %s", self._store_name, error)
                self._judge_outage(error, clock.monotonic() - self._down_since)
            self._stopping.wait(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _judge_outage(self, error: Exception, outage_s: float) -> None:
        """Give up the first contact when its time is over, and what waits when the store is away for too long."""
        reason = str(error) if isinstance(error, StackUnreachable) else f"the result store at {self._store_name} is unreachable: {error}"
        if not self.ready.done():
            if outage_s >= self._connect_timeout_s:
                self.ready.set_exception(StackUnreachable(reason))
                self._stopping.set()
        elif outage_s >= self._outage_s:
            self._inbox.give_up_sent(reason)

    def _listen(self, pubsub: PubSub) -> None:
        """Hand on what arrives until the client closes or the subscription turns out to be deaf."""
        next_sweep, next_sign = clock.monotonic() + SWEEP_S, 0.0
        while not self._stopping.is_set():
            if clock.monotonic() >= next_sign:
                give_sign(self._store, self._client_id)
                if not self.ready.done():
                    self._loads.check(self._store)
                self._loads.look(self._store)
                next_sign = clock.monotonic() + SIGN_S
            message = pubsub.get_message(timeout=min(_LISTEN_S, SIGN_S))
            if message is not None:
                self._take(message)
            if clock.monotonic() >= next_sweep:
                if self._missed(pubsub):
                    _log.warning("results were stored that the subscription did not bring: subscribing again")
                    return
                self._inbox.send_again(due=True)
                next_sweep = clock.monotonic() + SWEEP_S

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "pmessage":
            channel = message["channel"].decode("utf-8", "replace")
            self._inbox.deliver(channel.removeprefix(RESULT_KEY_PREFIX), message["data"])
        elif message["type"] == "psubscribe":
            # redis-py may have connected again by itself; the confirmation is the one sign that it did.
            self._down_since = None
            self._sweep()
            if not self.ready.done():
                self.ready.set_result(None)
            elif again := self._inbox.send_again():
                _log.warning("%d actions have no result yet and are submitted again: the scheduler knows those that it has", again)

    def _missed(self, pubsub: PubSub) -> bool:
        """Say whether results are stored that the subscription did not bring, and take them in.

        What the server had published is read first, up to its answer to a ping: under load some of it is still on its way.
        """
        ended = self._ended()
        if not ended:
            return False
        pubsub.ping()
        until = clock.monotonic() + _ANSWER_S
        while (left_s := until - clock.monotonic()) > 0:
            # None is no end of it: so redis-py tells the answer to a ping of its own.
            message = pubsub.get_message(timeout=left_s) or {"type": None}
            if message["type"] == "pong":
                break
            self._take(message)
        return sum(self._inbox.deliver(task_id, raw) for task_id, raw in ended) > 0

    def _sweep(self) -> None:
        """Take in the results of waiting tasks that ended while nobody listened."""
        for task_id, raw in self._ended():
            self._inbox.deliver(task_id, raw)

    def _ended(self) -> list[tuple[str, bytes]]:
        """Read the keys of all waiting tasks."""
        waiting = self._inbox.waiting()
        found = []
        for start in range(0, len(waiting), _KEYS_AT_ONCE):
            ids = waiting[start : start + _KEYS_AT_ONCE]
            for task_id, raw in zip(ids, self._store.mget([RESULT_KEY_PREFIX + i for i in ids]), strict=True):
                if isinstance(raw, bytes):
                    found.append((task_id, raw))
        return found
