"""Hands input, signals and sizes of terminals from clients on to the nodes of their commands.

The core, the journal and the event log know nothing of this, as it does not affect scheduling.

| the command | what is given |
|---|---|
| runs | goes to its node at once |
| waits | is kept until it starts, at most `MOST_BYTES` for one command and `ALL_BYTES` in all; a restart of the scheduler forgets it |
| has ended, or is of another client and job | is dropped |
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from scheduler.live.reports import Give
from scheduler.live.transport import Transport
from scheduler.model.state import State

log = logging.getLogger(__name__)

MOST_BYTES: Final = 4 * 1024 * 1024
ALL_BYTES: Final = 256 * 1024 * 1024
_COST: Final = 256
"""Approximate bytes of a message without its content."""


@dataclass(slots=True)
class _Kept:
    """Items that are kept for one command, in order of arrival."""

    given: list[Give] = field(default_factory=list)
    size: int = 0
    is_full: bool = False


class InputRelay:
    """Keeps items for waiting commands, and sends items to running commands."""

    def __init__(self, state: State, transport: Transport) -> None:
        self._state, self._transport = state, transport
        self._kept: dict[str, _Kept] = {}
        self._size = 0

    def take(self, given: Give) -> None:
        """Hand on, keep or drop an item of a client."""
        running, waiting = self._state.running.get(given.id), self._state.waiting.get(given.id)
        one = running.waiting if running is not None else waiting
        if one is None:
            log.debug("what was given to command %s is dropped: it has ended", given.id)
        elif not given.may_reach(one.action):
            log.warning("client %s of job %r gives something to command %s, which is not its own", given.client, given.job, given.id)
        elif running is not None:
            self._send(running.grant.node, given)
        else:
            self._keep(given)

    def started(self, action_id: str, node: str) -> None:
        """Send the kept items of a command that starts."""
        kept = self._forget(action_id)
        for given in kept.given if kept is not None else ():
            self._send(node, given)

    def ended(self, action_id: str) -> None:
        """Forget the kept items of a command that has ended."""
        self._forget(action_id)

    def _keep(self, given: Give) -> None:
        kept = self._kept.setdefault(given.id, _Kept())
        size = _COST + sum(len(word) for word in given.what if isinstance(word, str))
        # Items after a gap would never be handed on.
        if kept.is_full or kept.size + size > MOST_BYTES or self._size + size > ALL_BYTES:
            if not kept.is_full:
                log.warning("command %s waits, and is given more than can be kept for it: the rest is dropped", given.id)
            kept.is_full = True
            return
        kept.given.append(given)
        kept.size += size
        self._size += size

    def _forget(self, action_id: str) -> _Kept | None:
        kept = self._kept.pop(action_id, None)
        if kept is not None:
            self._size -= kept.size
        return kept

    def _send(self, node: str, given: Give) -> None:
        arguments: Mapping[str, object] = {"id": given.id, "sender": given.sender, "number": given.number, "what": given.what}
        self._transport.send_control(node, "tangram.give", arguments)
