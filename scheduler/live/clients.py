"""Finds clients that are gone: they have given no sign of life for too long.

Silence counts only while this scheduler can hear clients. It does not count while the store is away or this process does not run,
nor at once when a scheduler starts:

| what happened | a client is given |
|---|---|
| nothing: the store has known its last sign all the time | `limit_s` since that sign |
| the store was away, this process stood still, or its clock was set | `limit_s` since that was over, at least |
| a scheduler starts | `START_S` since the start, at least |
| the store has lost its key | `limit_s` since that was seen |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from scheduler.live.transport import Transport
from scheduler.model import events
from scheduler.model.state import State

log = logging.getLogger(__name__)

START_S: Final = 15.0
"""Time that clients have for their next sign after the start of a scheduler. Store and clients may have been away before."""

CHECKS: Final = 10
"""How often clients are checked while the limit lasts."""


class Clients:
    """Listens to the clients with actions or environments. `handle` takes an event to the core."""

    def __init__(
        self, state: State, transport: Transport, handle: Callable[[events.Event, float], None], limit_s: float, now: float
    ) -> None:
        """Begin at `now`. With a limit of 0, no client ever counts as gone."""
        self._state = state
        self._transport = transport
        self._handle = handle
        self._limit_s = limit_s
        self._heard_since = now - max(0.0, limit_s - START_S)
        self._checked_at = now
        self._unknown_since: dict[str, float] = {}

    def check(self, now: float) -> None:
        """Report clients that are gone to the core, if it is time to check."""
        if not self._limit_s or abs(now - self._checked_at) < self._limit_s / CHECKS:
            return
        stood_still = abs(now - self._checked_at) > self._limit_s / 2
        self._checked_at = now
        watched = self._watched()
        silences = self._transport.silences(watched) if watched else {}
        if silences is None or stood_still:
            self._heard_since = now
            return
        self._unknown_since = {client: self._unknown_since.get(client, now) for client, silent_s in silences.items() if silent_s is None}
        if now - self._heard_since < self._limit_s:
            return
        for client, silent_s in silences.items():
            silence_s = now - self._unknown_since[client] if silent_s is None else silent_s
            if silence_s >= self._limit_s:
                log.warning("client %s is gone: no sign of life for %.0f s", client, silence_s)
                self._handle(events.ClientGone(client=client, reason=f"its client gave no sign of life for {self._limit_s:g} s"), now)

    def _watched(self) -> list[str]:
        """Return the clients with actions or environments that are not ending already."""
        state = self._state
        waiting = [one.action.client for one in state.waiting.values() if one.action.kind != "cpu.close"]
        running = [
            one.waiting.action.client
            for one in state.running.values()
            if not one.stopping and one.waiting.action.kind not in ("cpu.open", "cpu.close")
        ]
        standing = [one.client for one in state.environments.values() if not one.close_requested and one.state != "closing"]
        return [client for client in dict.fromkeys([*waiting, *running, *standing]) if client]
