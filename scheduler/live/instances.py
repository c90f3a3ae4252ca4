"""Workers' reports of instances, turned into journal entries and events for the core.

A worker reports each change, and its beats repeat the present state. When it joins, its old instances are forgotten and its present
ones taken in. After that, a beat only corrects the effects of lost messages. The life cycle is in `model/lifecycle.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scheduler.gpu.cells import Instance
from scheduler.live.descriptions import amount_of, count_of, name_of
from scheduler.live.entries import InstanceChanged, InstancesForgotten
from scheduler.model import INSTANCE_COUNTS, events
from scheduler.model.copied import filled
from scheduler.model.lifecycle import SERVICE, ServiceState

log = logging.getLogger(__name__)

Name = tuple[str, tuple[int, ...]]

_STATES: Mapping[str, ServiceState] = {state: state for state in SERVICE.states}
_SETTLED: tuple[ServiceState, ...] = ("absent", "host", "resident", "failed")
"""States that count in a beat. The other states pass, and a report follows when they end."""
_UNDER_WAY: tuple[ServiceState, ...] = ("starting", "restoring", "evicting")

RESTORE_UNSEEN_S = 180.0
"""Seconds for which cells are kept for a restore that the node's beats do not show. The worker first waits for the calls of each
evicted instance, a minute each. After this time the control task, or the report of its end, counts as lost."""


class Instances:
    """Keeps the last report of each node. `handle` takes an event to the core, `note` an entry to the journal."""

    def __init__(self, handle: Callable[[events.Event, float], None], note: Callable[[InstanceChanged | InstancesForgotten], None]) -> None:
        self._handle = handle
        self._note = note
        self._said: dict[str, dict[Name, ServiceState]] = {}

    def joined(self, node: str, said: Iterable[Mapping[str, Any]], now: float) -> None:
        """Take in all instances of a node that has joined, and forget any others."""
        self._said[node] = {}
        self._note(InstancesForgotten(node=node, at=now, reason="its worker has not spoken of it since it joined"))
        for one in said:
            self.changed(node, one, now)

    def resumed(self, node: str, said: Iterable[Mapping[str, Any]], now: float) -> None:
        """Take in the starting and restoring instances of a node that an earlier scheduler knew.

        A report follows when these states end.
        """
        for one in said:
            if one.get("state") in ("starting", "restoring"):
                self.changed(node, one, now)

    def changed(self, node: str, said: Mapping[str, Any], now: float) -> None:
        """Take in a report of one instance. Raises `ValueError` or `LookupError` for an invalid report."""
        entry = entry_of(node, said, now)
        known = self._said.setdefault(node, {})
        name = (entry.service, entry.cell_ids)
        if entry.state == "absent":
            known.pop(name, None)
        else:
            known[name] = entry.state
        self._note(entry)
        self._tell(entry, now)

    def beat(self, node: str, said: Iterable[Mapping[str, Any]], now: float) -> None:
        """Compare a beat with the known instances, and take in the differences."""
        known = self._said.setdefault(node, {})
        there = {(str(one["service"]), _cells(one["cell_ids"])): one for one in said}
        for name, one in there.items():
            if one.get("state") in _SETTLED and known.get(name) != one["state"]:
                self.changed(node, one, now)
        for name, state in [(name, state) for name, state in known.items() if name not in there]:
            if state == "failed":
                # The instance never came to be. The journal keeps the reason.
                del known[name]
                self._tell(InstanceChanged(node=node, service=name[0], cell_ids=name[1], state="absent", at=now), now)
            elif state in _SETTLED:
                self.changed(node, {"service": name[0], "cell_ids": name[1], "state": "absent"}, now)

    def look_at_restores(self, node: str, booked: Iterable[Instance], said: Iterable[Mapping[str, Any]], now: float) -> None:
        """End restores of a node, by the core's books, whose report must have been lost."""
        states = {(one["service"], tuple(sorted(one["cell_ids"]))): one["state"] for one in said}
        for instance in [one for one in booked if one.restoring]:
            state = states.get((instance.service, instance.cell_ids))
            lost = state not in _UNDER_WAY and now - instance.since > RESTORE_UNSEEN_S
            if state != "resident" and not lost:
                continue
            if lost:
                log.warning("node %s does not bring %s onto cells %s; its cells are free again", node, instance.service, instance.cell_ids)
            ended = events.ServiceChanged(
                node=node,
                service=instance.service,
                cell_ids=instance.cell_ids,
                state="resident" if state == "resident" else "failed",
                reason="" if state == "resident" else "its node does not bring it",
            )
            self._handle(ended, now)

    def forget(self, nodes: Iterable[str]) -> None:
        """Drop the entries of nodes that are gone."""
        for node in nodes:
            self._said.pop(node, None)

    def nodes(self) -> list[str]:
        """Return the nodes that have entries."""
        return list(self._said)

    def _tell(self, entry: InstanceChanged, now: float) -> None:
        self._handle(filled(events.ServiceChanged, entry), now)


def sensible(node: str, said: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the valid instances of a report. An invalid instance must not hide the valid ones."""
    kept = []
    for one in said:
        try:
            entry_of(node, one, 0.0)
        except (ValueError, LookupError, TypeError) as error:
            log.warning("node %s says of an instance what makes no sense: %s", node, error)
        else:
            kept.append(one)
    return kept


def entry_of(node: str, said: Mapping[str, Any], now: float) -> InstanceChanged:
    """Return the entry for a report of one instance. Raises `ValueError`, `LookupError` or `TypeError` for an invalid report."""
    state = _STATES.get(str(said["state"]))
    if state is None:
        raise ValueError(f"no such state of a service: {said['state']!r}")
    measured: dict[str, Any] = {name: amount_of(said.get(name, 0.0)) for name in ("memory_mb", "host_mb")}
    measured |= {name: count_of(said.get(name, 0)) for name in INSTANCE_COUNTS}
    return InstanceChanged(
        node=node,
        service=name_of(said["service"]),
        cell_ids=_cells(said["cell_ids"]),
        state=state,
        at=now,
        reason=str(said.get("reason", "")),
        **measured,
    )


def _cells(said: Iterable[Any]) -> tuple[int, ...]:
    return tuple(sorted(map(count_of, said)))
