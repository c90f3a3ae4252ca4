"""The node: what one worker process is to the scheduler.

It claims tries of actions, holds their calls while they run, and reports.

| report | when |
|---|---|
| `joined` | the worker consumes its queue; a description of the node with a fresh incarnation |
| `beat` | every `beat_s` seconds, and when it begins to hand over; the same description, with what runs and stands now |
| `started` | before a beat, of each try that was claimed since the last one and still runs |
| `sent` | the request of a call to an outside API goes out |
| `used` | every `usage_s` seconds, of each command that has got further in the background: its core-seconds there |
| `memory_wanted` | an environment is paused until it is allowed more memory; again with each beat |
| `service` | an instance of a service is in another state now, and what it holds |
| `finished` | its result is stored and its processes are gone, both at once where the broker is the store; again when asked for |
| `unknown` | the scheduler asked for a try that never arrived here, or the store has not got the result of one |
| `left` | the worker shuts down |

Of a request to an outside API `finished` also says what the answer means for limits, and whether the API refused it: then there
is no result, and the action waits again.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from celery import Celery
from kombu.message import Message
from redis import Redis

from app.action_task import Call
from tangram import clock
from tangram.wire import CLAIM_TTL_S, EVENTS_QUEUE, GRANT_HEADER, WireGrant, WireNode, WireRegrant, claim_key, direct_queue, of_shard
from workers.cpu.abstract import Holding, Usage
from workers.metered import Metered
from workers.regrants import STALE, Early, Stamp, granted, holding_of, resize
from workers.reporter import Reporter
from workers.resumed import read

log = logging.getLogger(__name__)

REMEMBERED = 4096
"""Tries of actions of which early control requests, and ends, are remembered."""

_CLAIM_PAUSE_S = 0.2

Try = tuple[str, int]
"""An action's id and the number of the try."""

V = TypeVar("V")


class Node:
    """One node's claims and reports. Safe for many threads."""

    def __init__(
        self,
        app: Celery,
        store: Redis,
        description: WireNode,
        *,
        beat_s: float,
        usage_s: float,
        timeout_s: float,
        shard: int = 0,
        now: Callable[[], dict[str, Any]] = dict,
        wanted: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        """Describe the node; nothing is sent before `join`.

        `timeout_s` is that of actions that name none. The scheduler of the `shard` hears of the node. `now` returns the parts of the
        description that change, as they are now: the environments that stand on it, its services and their instances. `wanted` returns
        the reports that are repeated with each beat.
        """
        self._store = store
        self._timeout_s = timeout_s
        self._incarnation = secrets.token_hex(8)
        self._description: WireNode = {**description, "incarnation": self._incarnation}
        self._now = now
        self._lock = clock.lock()
        self._epoch = 0
        self._has_joined = self._has_left = self._hands_over = self._takes_nothing = False
        self._is_let_go = False
        self._stirred = clock.event()
        """Set when a worker that hands over may be done."""
        self._arrived: dict[str, None] = {}
        self._calls: dict[str, Call] = {}
        self._claimed: OrderedDict[Try, None] = OrderedDict()
        self.resumed: list[Message] = []
        """Messages of what the worker before this one has left running, to be carried out before it joins."""
        self._left: set[Try] = set()
        self._finished: OrderedDict[Try, dict[str, Any]] = OrderedDict()
        self._stops: OrderedDict[Try, tuple[str, str]] = OrderedDict()
        self._early: OrderedDict[Try, Early] = OrderedDict()
        self._metered: dict[str, Metered] = {}
        self._events = direct_queue(of_shard(EVENTS_QUEUE, shard))
        self._reporter = Reporter(app, self._events, self._describe, beat_s, self.used, usage_s, lambda: [*self.begun(), *wanted()])

    @property
    def name(self) -> str:
        """The node's name."""
        return self._description["name"]

    def join(self) -> None:
        """Report the node and begin to beat."""
        self._has_joined = True
        self._reporter.put({"type": "joined", "node": self._describe()})
        self._reporter.start()

    def report(self, report: dict[str, Any]) -> None:
        """Have a report sent that is about no action; never blocks."""
        self._reporter.put(report)

    def leave(self, timeout_s: float = 5.0) -> None:
        """Report that the node goes, stop what runs, and wait until all reports are out. Idempotent.

        From then on nothing counts that happens here: the scheduler may have what ran begin elsewhere at once.
        """
        with self._lock:
            first, self._has_left = not self._has_left, True
            running = list(self._calls.values())
        self._stirred.set()
        if first:
            self._reporter.put({"type": "left", "name": self.name, "incarnation": self._incarnation})
        for call in running if first else ():
            self.stop(call.id, 0, f"node {self.name} is being stopped")
        self._reporter.stop(timeout_s)

    def hand_over(self, limit_s: float) -> bool:
        """Say that another worker goes on with this node, and return once no try is claimed here any more.

        Until then, what the scheduler had granted before it knew is carried out, for `limit_s` at most. Return False if the node leaves
        meanwhile.
        """
        with self._lock:
            self._hands_over = True
        if self._has_joined:
            self._reporter.put({"type": "beat", "node": self._describe()})
        ends_at = clock.monotonic() + limit_s
        while True:
            self._stirred.clear()
            left_s = ends_at - clock.monotonic() if self._has_joined else 0.0
            with self._lock:
                is_done = self._is_let_go and not self._calls and not self._arrived
                if is_done or left_s <= 0 or self._has_left:
                    self._takes_nothing = True
                    return not self._has_left
            self._stirred.wait(left_s)

    def let_go(self, incarnation: str) -> None:
        """Take note that this worker has been sent all that it gets. The message may have been for the worker before it."""
        with self._lock:
            self._is_let_go = self._is_let_go or incarnation == self._incarnation
        self._stirred.set()

    def send_rest(self, timeout_s: float = 5.0) -> None:
        """Send the reports that are left, and no more."""
        self._reporter.stop(timeout_s)

    def go_on_with(self, messages: Sequence[str]) -> None:
        """Take over what the worker before this one has left running, before this one joins; see `resumed.py`."""
        self.resumed = read(messages)
        self._left = {(str(message.headers["id"]), int(message.headers[GRANT_HEADER]["attempt"])) for message in self.resumed}

    def note_arrival(self, action_id: str) -> None:
        """Note that the message of a try has come; its call may still have to wait for a thread."""
        with self._lock:
            self._arrived[action_id] = None

    def claim(self, action_id: str, grant: WireGrant, header: dict[str, Any]) -> Call | None:
        """Claim a try of an action.

        Returns None for a message to be dropped. This try was claimed before, or its grant comes from a scheduler that has been
        replaced, or it was meant for the worker before this one.
        """
        one = (action_id, grant["attempt"])
        try:
            lasts_s = CLAIM_TTL_S + math.ceil(header.get("timeout_s") or self._timeout_s)
            if not self._takes_over(one, grant) and not (self._may_claim(one, grant) and self._claim_in_store(one, lasts_s)):
                return None
            return self._begin(one, grant, header)
        finally:
            with self._lock:
                self._arrived.pop(action_id, None)
            self._stirred.set()

    def _takes_over(self, one: Try, grant: WireGrant) -> bool:
        """Return whether the worker before this one has claimed a try and left it running, once.

        It goes on once this one has joined. Otherwise what follows its end would be granted to the worker before.
        """
        with self._lock:
            if one not in self._left:
                return False
            self._left.discard(one)
        self._reporter.has_joined.wait()
        with self._lock:
            self._epoch = max(self._epoch, grant["epoch"])
            _keep(self._claimed, one, None)
            return True

    def _may_claim(self, one: Try, grant: WireGrant) -> bool:
        epoch = grant["epoch"]
        with self._lock:
            if self._has_left or self._takes_nothing:
                return False
            if grant.get("incarnation", "") not in ("", self._incarnation):
                log.warning("the grant of action %s was for the worker before this one", one[0])
                return False
            if epoch < self._epoch:
                log.warning("the grant of action %s is out of date: epoch %d, now %d", one[0], epoch, self._epoch)
                return False
            self._epoch = epoch
            # The store forgets its claims when it is restarted; what this process did it knows by itself.
            if one in self._claimed:
                log.info("try %d of action %s came twice; the second message is dropped", one[1], one[0])
                return False
            _keep(self._claimed, one, None)
            return True

    def _claim_in_store(self, one: Try, lasts_s: int) -> bool:
        """Claim a try in the store, which is waited for as long as it is away: meanwhile beats show the action as one that runs."""
        key, said = claim_key(*one), False
        while not self._has_left:
            try:
                if self._store.set(key, self._incarnation, nx=True, ex=lasts_s):
                    return True
                # An earlier `set` of ours may have arrived though its answer did not.
                owner = self._store.get(key)
                if isinstance(owner, bytes) and owner.decode() == self._incarnation:
                    return True
                log.info("try %d of action %s was claimed before; this message is dropped", one[1], one[0])
                return False
            except Exception as error:  # redis-py lets others through than its own; one that got out would be the action's end
                if not said:
                    log.warning("action %s cannot be claimed yet: %s", one[0], error)
                said = True
                clock.sleep(_CLAIM_PAUSE_S)
        return False

    def _begin(self, one: Try, grant: WireGrant, header: dict[str, Any]) -> Call:
        call = Call(one[0], grant, header, clock.time(), clock.monotonic(), self._events.name)
        with self._lock:
            self._calls[call.id] = call
            call.cancel_reason, call.cancel_cause = self._stops.pop(one, ("", ""))
            call.stamp = (grant["epoch"], 0)
            early = self._early.pop(one, None)
            if early is not None and early.stamp < call.stamp:
                log.debug(STALE, one[1], one[0], early.stamp, call.stamp)
            elif early is not None:
                call.grant, call.stamp = cast(WireGrant, {**grant, **early.change}), early.stamp
        return call

    def call(self, action_id: str) -> Call:
        """Return the call of a claimed action. Raises `KeyError` for others."""
        with self._lock:
            return self._calls[action_id]

    def note_sent(self, call: Call) -> None:
        """Report that the request of a call goes out now; never blocks."""
        call.sent_at = clock.time()
        for report in call.sent_report():
            self._reporter.put(report)

    def attach(
        self,
        call: Call,
        on_stop: Callable[[str], None],
        on_resize: Callable[[Holding], None] | None = None,
        meter: Callable[[], Usage | None] | None = None,
    ) -> None:
        """Say how a running call is stopped, resized and measured; what was asked before is carried out now."""
        with call.grant_lock:
            with self._lock:
                call.on_stop, call.on_resize = on_stop, on_resize
                holding = holding_of(call.grant)
                if meter is not None:
                    self._metered[call.id] = Metered(call, meter)
                stop = call.cancel_reason
            if stop:
                on_stop(stop)
            if on_resize is not None and (holding.cores or holding.background):
                on_resize(holding)

    def stop(self, action_id: str, attempt: int, reason: str, cause: str = "cancelled") -> None:
        """Stop a running call, or the one that is about to be claimed; attempt 0 means any that runs."""
        with self._lock:
            call = self._calls.get(action_id)
            if call is None:
                if attempt:
                    _keep(self._stops, (action_id, attempt), (reason, cause))
                return
            if attempt not in (0, call.grant["attempt"]):
                return
            call.cancel_reason, call.cancel_cause = (call.cancel_reason, call.cancel_cause) if call.cancel_reason else (reason, cause)
            on_stop = call.on_stop
        if on_stop is not None:
            on_stop(reason)

    def regrant(self, epoch: int, serial: int, grants: Iterable[object]) -> None:
        """Change the grants of running calls, or of ones that are about to be claimed, in this order.

        Each is a `WireRegrant`. One that is wrong is passed over, one that is out of date is dropped.
        """
        stamp = (int(epoch), int(serial))
        for each in grants:
            try:
                action_id, attempt, core_ids, background = cast(WireRegrant, each)
                self._change((str(action_id), int(attempt)), stamp, granted(tuple(core_ids), background=bool(background)))
            except Exception as error:
                # Whatever is wrong with it, the others must not suffer.
                log.warning("a change of a grant is passed over, %r: %s", each, error)

    def _change(self, one: Try, stamp: Stamp, change: dict[str, Any]) -> None:
        """Change the grant of a try, now or when it comes, unless there was a newer change."""
        action_id, attempt = one
        with self._lock:
            call = self._calls.get(action_id)
            if call is None or call.grant["attempt"] < attempt:
                early = self._early.get(one) or Early(stamp)
                if stamp < early.stamp:
                    log.debug(STALE, attempt, action_id, stamp, early.stamp)
                else:
                    # What another scheduler has sent is no part of this one's grant.
                    kept = early.change if early.stamp[0] == stamp[0] else {}
                    early.stamp, early.change = stamp, kept | change
                    _keep(self._early, one, early)
                return
        with call.grant_lock:
            with self._lock:
                if call.grant["attempt"] != attempt:
                    return
                if stamp < call.stamp:
                    log.debug(STALE, attempt, action_id, stamp, call.stamp)
                    return
                call.grant, call.stamp = cast(WireGrant, {**call.grant, **change}), stamp
                on_resize = call.on_resize
            if on_resize is not None:
                resize(call, on_resize)

    @property
    def has_left(self) -> bool:
        """Whether no result counts any more that a call here ends with. Of a try that was given up, the store refuses it."""
        return self._has_left

    def finish(self, call: Call) -> None:
        """Report the end of a claimed call, unless that has gone out with its result."""
        self._report_end(call.id, call.grant["attempt"], call)

    def refuse(self, action_id: str, attempt: int, status: str, reason: str, cause: str) -> None:
        """Report the end of a try that came here and is never called: nobody knows its task, or it was revoked."""
        with self._lock:
            self._arrived.pop(action_id, None)
            _keep(self._claimed, (action_id, attempt), None)
        call = Call(action_id, {"attempt": attempt}, {}, clock.time(), 0.0, self._events.name)  # type: ignore[typeddict-item]
        call.status, call.reason, call.cause, call.execution_s = status, reason, cause, 0.0
        self._report_end(action_id, attempt, call)

    def tell(self, action_id: str, attempt: int) -> None:
        """Say once more how a try ended, or that it never arrived; nothing while it is at hand."""
        with self._lock:
            call = self._calls.get(action_id)
            if action_id in self._arrived or (call is not None and call.grant["attempt"] == attempt):
                return
            report = self._finished.get((action_id, attempt))
        self._reporter.put(report or {"type": "unknown", "id": action_id, "attempt": attempt, "at": clock.time()})

    def _report_end(self, action_id: str, attempt: int, call: Call) -> None:
        report = call.report()
        with self._lock:
            if self._calls.get(action_id) is call:  # else a newer try of it runs
                del self._calls[action_id]
                self._metered.pop(action_id, None)
            self._stops.pop((action_id, attempt), None)
            self._early.pop((action_id, attempt), None)
            _keep(self._finished, (action_id, attempt), report)
            on_told = None if call.unstored else call.on_told
            if not call.end_is_told:
                self._reporter.put(report)
        if on_told is not None:
            on_told()
        self._stirred.set()

    def begun(self) -> list[dict[str, Any]]:
        """Return reports of the calls that have begun since this was asked last."""
        with self._lock:
            begun = [call for call in self._calls.values() if not call.start_is_told]
        for call in begun:
            call.start_is_told = True
        return [{"type": "started", "id": call.id, "attempt": call.grant["attempt"], "at": call.started_at} for call in begun]

    def used(self) -> list[dict[str, Any]]:
        """Return reports of what commands have used; see the table above for which."""
        with self._lock:
            metered = list(self._metered.values())
        reports = ((each.call, each.take_report()) for each in metered)
        return [
            {"type": "used", "id": call.id, "attempt": call.grant["attempt"], "background_cpu_s": background_cpu_s}
            for call, background_cpu_s in reports
            if background_cpu_s is not None
        ]

    def _describe(self) -> WireNode:
        with self._lock:
            running = [*self._calls, *self._arrived]
            held = {call.id: call.grant["core_ids"] for call in self._calls.values()}
            leaving = {"leaving": True} if self._hands_over else {}
        return cast(WireNode, {**self._description, "running": running, "held_cores": held, **leaving, **self._now()})


def _keep(kept: OrderedDict[Try, V], one: Try, value: V) -> None:
    kept[one] = value
    if len(kept) > REMEMBERED:
        kept.popitem(last=False)
