"""Poison messages: messages on which the scheduler fails, and how they are recognised.

An exception during a message leaves the core half changed. So the scheduler stops, and the next scheduler gets the message again.
Each failure is written down with its message. From the second failure on, the message is *set aside*: no core gets it again. The
action of the message ends as `failed`, unless its worker has stored a result.

| message | known by |
|---|---|
| an action, a report of it, a cancel of it alone; its reload from the journal | the action's id |
| a beat or the goodbye of a worker; the reload of its node | the node's name and its worker's incarnation, so until that worker restarts |
| the reload of an environment | the environment's id |
| any other | its content, for `CONTENT_S`: the same content much later is another message |

A tick is no message. Its failures are written down and shown in the same way, but a tick is never set aside. Without ticks no
deadline and no lease would end, and no operator would notice. The next scheduler ticks at another time, which may succeed. The
program that restarts schedulers decides how often.
"""

from __future__ import annotations

import hashlib
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from scheduler.live import reports
from scheduler.live.entries import Journal, MessageFailed, SetAside
from scheduler.model import events

log = logging.getLogger(__name__)

CAUSE: Final = "set_aside"
"""The cause of the end of an action whose message is set aside."""

FAILURES_ALLOWED: Final = 1
"""Failures after which the next scheduler still gets the message."""

CONTENT_S: Final = 3600.0
"""Time for which a message that is known only by its content stays set aside."""

_CONTENT: Final = "content "


class CoreBroken(RuntimeError):
    """Raised when the core fails on an event, or its commands cannot be carried out. The core's state is then no longer valid.

    The batch is not acknowledged. So the next scheduler begins with the journal and gets the batch again.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message to the scheduler. `key` identifies it, and `action` is its action, if any."""

    key: str
    kind: str
    action: str | None = None


TICK: Final = Message(key="tick", kind="tick")
"""Stands for a tick in records of failures."""


def of_action(action_id: str, kind: str) -> Message:
    """Return the message of an action, or a message about an action."""
    return Message(key=f"action {action_id}", kind=kind, action=action_id)


def of_node(name: str, description: Mapping[str, Any], kind: str) -> Message:
    """Return a message of a node's worker about the node. `description` is the worker's description."""
    return Message(key=f"node {name} {description.get('incarnation', '')}", kind=kind)


def of_environment(environment_id: str) -> Message:
    """Return the reload of an environment."""
    return Message(key=f"environment {environment_id}", kind="reload")


def of_content(kind: str, content: object) -> Message:
    """Return a message that is known only by its content."""
    text = json.dumps(content, sort_keys=True, default=str)
    return Message(key=f"{_CONTENT}{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}", kind=kind)


def of_cancel(request: reports.Cancel) -> Message:
    """Return a trainer's cancel."""
    if len(request.ids) == 1 and request.job is None:
        return of_action(request.ids[0], "cancel")
    return of_content("cancel", request.model_dump())


def of_report(kind: str, said: reports.Report, descriptions: Mapping[str, Mapping[str, Any]]) -> Message:
    """Return the message of a worker's report. `descriptions` are the descriptions of the nodes that are up, by name."""
    match said:
        case reports.Beat():
            return of_node(str(said.node["name"]), said.node, kind)
        case reports.Left():
            return of_node(said.name, descriptions.get(said.name, {}), kind)
        case reports.ServiceChanged():
            return of_content(kind, said.model_dump())
        case events.MemoryWanted():
            return of_content(kind, asdict(said))
        case reports.Finished():
            return of_action(said.event.id, kind)
        case _:
            return of_action(said.id, kind)


class Quarantine:
    """Knows the messages that are set aside, and writes down the failures of this scheduler, of this `epoch`."""

    def __init__(self, journal: Journal, epoch: int) -> None:
        self._journal = journal
        self._epoch = epoch
        self._set_aside: dict[str, SetAside] = {}

    def load(self, set_aside: Sequence[SetAside]) -> None:
        """Take in the journal's messages that are set aside."""
        self._set_aside = {one.message: one for one in set_aside}
        tick = self._set_aside.pop(TICK.key, None)
        if tick is not None:
            log.error("%d schedulers have failed on a tick, at last with %r: see `tangram status`", tick.failures, tick.error)
        if self._set_aside:
            log.warning("%d messages are set aside, see `tangram status`", len(self._set_aside))

    def holds(self, message: Message) -> bool:
        """Return whether a message that is known by an id is set aside."""
        return message.key in self._set_aside

    def deal(self, message: Message, now: float, take: Callable[[], None], instead: Callable[[SetAside], None] | None = None) -> None:
        """Call `take` for a message, or `instead` if it is set aside."""
        found = self._set_aside.get(message.key)
        if found is not None and message.key.startswith(_CONTENT) and now - found.failed_at > CONTENT_S:
            found = None
        if found is None:
            with self.watch(message, now):
                take()
            return
        log.debug("%s %s is set aside", found.kind, found.message)
        if instead is not None:
            instead(found)

    @contextmanager
    def watch(self, message: Message, now: float) -> Iterator[None]:
        """Write down a failure on this message."""
        try:
            yield
        except Exception as error:
            self._note(message, error, now)
            raise

    def _note(self, message: Message, error: Exception, now: float) -> None:
        # `CoreBroken` names only the event. Its cause is the real error.
        cause = error.__cause__ if isinstance(error, CoreBroken) and error.__cause__ is not None else error
        failed = MessageFailed(
            message=message.key,
            kind=message.kind,
            action=message.action,
            epoch=self._epoch,
            traceback="".join(traceback.format_exception(cause)),
            at=now,
        )
        try:
            self._journal.write([failed])
        except Exception as problem:
            # The scheduler stops with the original error, which says more than this problem.
            log.error("the failure on %s %s could not be written down: %s", message.kind, message.key, problem)


def reason_of(found: SetAside) -> str:
    """Return the reason for the end of an action whose message is set aside."""
    return (
        f"the scheduler failed on it {found.failures} times, at last on its message {found.kind!r} with {found.error!r}; it was set aside, "
        f"and the traceback is in the journal's table failed_messages, under {found.message!r}"
    )
