"""Hands input, signals and sizes of terminals from clients on to the nodes of their commands.

The core, the journal and the event log know nothing of this, as it does not affect scheduling.

| the command | what is given |
|---|---|
| runs | goes to its node at once |
| waits | is kept until it starts, at most `MOST_BYTES` for one command and `ALL_BYTES` in all |
| has not come yet | is kept until it comes, at most `EARLY_BYTES` in all: what is given to later commands displaces it |
| has ended, or is of another client and job | is dropped |

A command and what it is given come by different queues, so either can be the first. A shard may get what is for another one's commands.
A restart of the scheduler forgets what is kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from scheduler.live.reports import Give
from scheduler.live.transport import Transport
from scheduler.model.state import State
from tangram.action import Action

log = logging.getLogger(__name__)

MOST_BYTES: Final = 4 * 1024 * 1024
ALL_BYTES: Final = 256 * 1024 * 1024
EARLY_BYTES: Final = 16 * 1024 * 1024
_COST: Final = 256
"""Approximate bytes of a message without its content."""


@dataclass(slots=True)
class _Items:
    """Items that are kept for one command, in order of arrival."""

    given: list[Give] = field(default_factory=list)
    size: int = 0
    is_full: bool = False


class _Kept:
    """Items that are kept for several commands, the oldest command first. They take `size` bytes, at most `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self.commands: OrderedDict[str, _Items] = OrderedDict()
        self.size = 0
        self._most_bytes = most_bytes

    def add(self, given: Give) -> None:
        """Keep an item, unless it is too much."""
        items = self.commands.setdefault(given.id, _Items())
        size = _COST + sum(len(word) for word in given.what if isinstance(word, str))
        # Items after a gap would never be handed on.
        if items.is_full or items.size + size > MOST_BYTES or self.size + size > self._most_bytes:
            if not items.is_full:
                log.warning("command %s does not run yet, and is given more than can be kept for it: the rest is dropped", given.id)
            items.is_full = True
            return
        items.given.append(given)
        items.size += size
        self.size += size

    def pop(self, action_id: str) -> Sequence[Give]:
        """Return the items of a command, and forget them."""
        items = self.commands.pop(action_id, None)
        if items is None:
            return ()
        self.size -= items.size
        return items.given


class InputRelay:
    """Keeps items for commands that do not run yet, and sends items to running commands. `ended` holds the commands that have ended."""

    def __init__(self, state: State, transport: Transport, ended: Container[str]) -> None:
        self._state, self._transport, self._ended = state, transport, ended
        self._kept = _Kept(ALL_BYTES)
        self._early = _Kept(ALL_BYTES)

    def take(self, given: Give) -> None:
        """Hand on, keep or drop an item of a client."""
        running, waiting = self._state.running.get(given.id), self._state.waiting.get(given.id)
        one = running.waiting if running is not None else waiting
        if one is None and given.id not in self._ended:
            self._keep_early(given)
        elif one is None:
            log.debug("what was given to command %s is dropped: it has ended", given.id)
        elif not given.may_reach(one.action):
            _refuse(given)
        elif running is not None:
            self._send(running.grant.node, given)
        else:
            self._kept.add(given)

    def arrived(self, action_id: str, action: Action) -> None:
        """Keep for a command that has come what was given to it before."""
        for given in self._early.pop(action_id):
            if given.may_reach(action):
                self._kept.add(given)
            else:
                _refuse(given)

    def started(self, action_id: str, node: str) -> None:
        """Send the kept items of a command that starts."""
        for given in self._kept.pop(action_id):
            self._send(node, given)

    def ended(self, action_id: str) -> None:
        """Forget the kept items of a command that has ended."""
        self._kept.pop(action_id)

    def _keep_early(self, given: Give) -> None:
        early = self._early
        early.add(given)
        while early.size > EARLY_BYTES and len(early.commands) > 1:
            oldest = next(iter(early.commands))
            log.debug("what command %s is given is dropped: the command has not come, and more came for others", oldest)
            early.pop(oldest)

    def _send(self, node: str, given: Give) -> None:
        arguments: Mapping[str, object] = {"id": given.id, "sender": given.sender, "number": given.number, "what": given.what}
        self._transport.send_control(node, "tangram.give", arguments)


def _refuse(given: Give) -> None:
    log.warning("client %s of job %r gives something to command %s, which is not its own", given.client, given.job, given.id)
