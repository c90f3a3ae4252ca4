"""The results a client waits for: what was submitted and has not ended.

| an action here | because |
|---|---|
| is entered | `expect`, before its message is sent |
| leaves with a value or an error | `deliver`, its final result arrived |
| leaves with an error | `fail`: its message cannot be sent, or the client is closed |
| leaves with `StackUnreachable`, or `Unknown` where it was perhaps sent | `give_up`: the stack is away for too long |

Each future is resolved exactly once, by whoever takes its entry out. Two further threads decode large results and those that are
kept in blobs. So one large result does not hold up the thousand small ones behind it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from redis import RedisError

from tangram import clock
from tangram.blobs import Blobs
from tangram.decode import Meta, decode, drop_parts, read_meta
from tangram.errors import ActionFailed, StackUnreachable, TangramError, Unknown
from tangram.tracing import ActionSpan
from tangram.wire import BLOB_THRESHOLD_BYTES

FIRST_ASK_S, LONGEST_ASK_S = 30.0, 480.0
"""After how long a task without a result is submitted again, and the longest pause between two such submissions."""

_DECODERS = 2
_THREADS = "tangram-decode"
_log = logging.getLogger(__name__)


def firm_future() -> Future[Any]:
    """Return a future that counts as running from the start: cancelling what waits for it never cancels the future itself."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True)
class _Entry:
    """One action that has not ended; `submitted` is on the monotonic clock, `again` says whether others may ask for its result.

    `repeats` send what the broker may have lost: the submission, and then its cancel, if it was cancelled. They are sent at `ask_at`, and
    `pause_s` later. `group` is its job and its trajectory. `withdraw` undoes the action. `sent` says
    that the broker may have its message, `with_broker` that the broker has it.
    """

    kind: str
    submitted: float
    future: Future[Any]
    again: bool
    span: ActionSpan | None = None
    group: tuple[str, str] = ("", "")
    shard: int = 0
    repeats: list[Callable[[], None]] = field(default_factory=list)
    ask_at: float = field(default_factory=lambda: clock.monotonic() + FIRST_ASK_S)
    pause_s: float = FIRST_ASK_S
    withdraw: Callable[[], None] | None = None
    sent: bool = False
    with_broker: bool = False


class Inbox:
    """Matches arriving results with the futures that wait for them; safe for use by many threads."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._waiting: dict[str, _Entry] = {}
        self._decoders = clock.pool(_DECODERS, _THREADS)

    def expect(
        self,
        task_id: str,
        kind: str,
        span: ActionSpan | None = None,
        *,
        again: bool = False,
        send_again: Callable[[], None] | None = None,
        withdraw: Callable[[], None] | None = None,
        group: tuple[str, str] = ("", ""),
        shard: int = 0,
    ) -> Future[Any]:
        """Wait for the result of a task that is about to be submitted to a `shard`; its `span`, where there is one, is told.

        `send_again` submits the task once more, where its message may have been lost. `withdraw` undoes it, where it is given up.

        Large parts of the result leave the store once they are here, unless it may be asked for `again`, by whoever knows the task's id.
        """
        future = firm_future()
        repeats = [send_again] if send_again is not None else []
        self._waiting[task_id] = _Entry(kind, clock.monotonic(), future, again, span, group, shard, repeats, withdraw=withdraw)
        if span is not None:
            future.add_done_callback(span.ended)
        return future

    def waiting_for(self, task_id: str) -> Future[Any] | None:
        """Return the future of a task that is waited for already; None where it is not."""
        entry = self._waiting.get(task_id)
        return entry.future if entry is not None else None

    def shard_of(self, task_id: str) -> int | None:
        """Return the shard of a task that is waited for; None where it is not."""
        entry = self._waiting.get(task_id)
        return entry.shard if entry is not None else None

    def waiting(self) -> list[str]:
        """Return the ids of all tasks that have not ended."""
        return list(self._waiting)

    def waiting_of(self, job: str, trajectory: str | None) -> list[str]:
        """Return those of a trajectory of a job, or of the whole job, but for closes."""
        of = [(id_, one) for id_, one in list(self._waiting.items()) if one.group[0] == job and trajectory in (None, one.group[1])]
        return [id_ for id_, one in of if one.kind != "cpu.close"]

    def send_again(self, *, due: bool = False) -> int:
        """Submit sent tasks that have not ended once more, all or those that are `due`; return how many. Each is due after twice the time.

        The publisher still has what was not sent, maybe while its large value is on its way.
        """
        now = clock.monotonic()
        again = [entry for entry in list(self._waiting.values()) if entry.sent and entry.repeats and (not due or entry.ask_at <= now)]
        for entry in again:
            entry.pause_s = min(2 * entry.pause_s, LONGEST_ASK_S) if due else FIRST_ASK_S
            entry.ask_at = now + entry.pause_s
            for send in list(entry.repeats):
                send()
        return len(again)

    def note_cancel(self, task_id: str, send_again: Callable[[], None]) -> None:
        """Note that a task was cancelled. Whenever it is submitted once more, which is due soon, its cancel follows by `send_again`."""
        entry = self._waiting.get(task_id)
        if entry is not None:
            entry.repeats[1:] = [send_again]
            entry.ask_at = clock.monotonic()

    def deliver(self, task_id: str, raw: bytes) -> bool:
        """Take in what the store says of a task; return whether that ended an action waited for.

        Whatever `raw` holds, nothing is raised: a result that makes no sense fails its own action only.
        """
        if task_id not in self._waiting:
            return False
        try:
            meta = read_meta(raw)
        except ActionFailed as unreadable:
            return self.fail(task_id, unreadable)
        if not meta.final:
            return False
        entry = self._waiting.pop(task_id, None)
        if entry is None:
            return False
        if entry.span is not None:
            entry.span.arrived()
        if len(raw) > BLOB_THRESHOLD_BYTES or b'"$blob"' in raw:
            self._decode_beside(task_id, entry, meta)
        else:
            self._resolve(task_id, entry, meta)
        return True

    def is_with_broker(self, task_id: str) -> bool:
        """Return whether the broker has the message of a task that waits."""
        entry = self._waiting.get(task_id)
        return entry is not None and entry.with_broker

    def note_sent(self, task_id: str) -> None:
        """Note that the broker may have the message of a task from now on."""
        entry = self._waiting.get(task_id)
        if entry is not None:
            entry.sent = True

    def note_with_broker(self, task_id: str) -> None:
        """Note that the broker has the message of a task."""
        entry = self._waiting.get(task_id)
        if entry is not None:
            entry.with_broker = True

    def give_up(self, task_id: str, reason: str) -> None:
        """End the wait for a task, since the stack is away. What may still be done is withdrawn; a close is sent as soon as that goes."""
        entry = self._waiting.get(task_id)
        if entry is None:
            return
        done = entry.sent or entry.kind == "cpu.close"
        if self.fail(task_id, Unknown(reason, task_id) if done else StackUnreachable(reason)) and done and entry.withdraw is not None:
            entry.withdraw()

    def give_up_sent(self, reason: str) -> None:
        """Give up all tasks that the broker may have. Of all others their sender knows when to give them up."""
        for task_id, entry in list(self._waiting.items()):
            if entry.sent:
                self.give_up(task_id, reason)

    def fail(self, task_id: str, error: TangramError) -> bool:
        """End the wait for one task with `error`; return whether it was waited for."""
        entry = self._waiting.pop(task_id, None)
        if entry is None:
            return False
        entry.future.set_exception(error)
        return True

    def fail_all(self, make_error: Callable[[], TangramError]) -> int:
        """End every wait with an error of its own; return how many."""
        return sum(self.fail(task_id, make_error()) for task_id in self.waiting())

    def close(self) -> None:
        """Finish what is being decoded, unless one of the decoding threads is the caller; a store that is away is not waited for."""
        self._blobs.close()
        self._decoders.shutdown(wait=not threading.current_thread().name.startswith(_THREADS))

    def _decode_beside(self, task_id: str, entry: _Entry, meta: Meta) -> None:
        try:
            self._decoders.submit(self._resolve, task_id, entry, meta)
        except RuntimeError:
            # The interpreter is shutting down and takes no more work on threads.
            self._resolve(task_id, entry, meta)

    def _resolve(self, task_id: str, entry: _Entry, meta: Meta) -> None:
        try:
            value = decode(entry.kind, meta, entry.submitted, self._blobs)
        except TangramError as error:
            entry.future.set_exception(error)
        except RedisError as error:
            entry.future.set_exception(Unknown(f"a large result could not be fetched: {error}", task_id))
        except Exception as error:
            _log.exception("decoding a result of %s", entry.kind)
            entry.future.set_exception(ActionFailed(f"its result is unreadable: {error}", "result_lost"))
        else:
            entry.future.set_result(value)
            if not entry.again:
                drop_parts(meta, self._blobs)
