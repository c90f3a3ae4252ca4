"""What instances of services hold and have gone through, as the journal's entries tell it.

A worker's counts begin with the worker. What they have grown by is added to ours, so a worker that is started anew takes nothing away. Of
an instance that stood before this scheduler, the first counts are where ours begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

from app.metrics.bounded import Names
from app.metrics.families import counter, gauge_family
from scheduler.live.entries import InstanceChanged, InstancesForgotten
from scheduler.model import INSTANCE_COUNTS
from scheduler.model.lifecycle import SERVICE

MIB = 1 << 20

InstanceKey = tuple[str, str, tuple[int, ...]]
"""An instance: its node, its service, its cells."""


class Services:
    """The instances that have been heard of. Not safe for threads by itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = {what: counter(f"tangram_service_{what}_total", registry) for what in INSTANCE_COUNTS}
        self._names = Names()
        self._last: dict[InstanceKey, InstanceChanged] = {}
        self._fresh: set[str] = set()

    def forget(self, entry: InstancesForgotten) -> None:
        """Forget what a node had: its worker is another one now, whose counts begin with it."""
        self._drop(lambda key: key[0] == entry.node)
        self._fresh.add(entry.node)

    def node_gone(self, node: str) -> None:
        """Forget a node that is up no longer."""
        self._drop(lambda key: key[0] == node)
        self._fresh.discard(node)

    def _drop(self, goes: Callable[[InstanceKey], bool]) -> None:
        self._last = {key: entry for key, entry in self._last.items() if not goes(key)}

    def change(self, entry: InstanceChanged) -> None:
        """Take in what a worker says of an instance."""
        key = (entry.node, entry.service, entry.cell_ids)
        before, label = self._last.get(key), self._names.label(entry.service)
        for what in INSTANCE_COUNTS:
            count = getattr(entry, what)
            known = getattr(before, what) if before is not None else 0 if entry.node in self._fresh else count
            if (grown := count - known if count >= known else count) or before is None:
                self._counters[what].labels(service=label).inc(grown)
        self._last[key] = entry

    def gauges(self) -> Iterable[GaugeMetricFamily]:
        """Return how many instances there are, and what they hold."""
        states: Counter[tuple[str, str]] = Counter()
        memory: Counter[tuple[str, str]] = Counter()
        residue: Counter[str] = Counter()
        for entry in self._last.values():
            label = self._names.label(entry.service)
            states.update({(label, state): int(state == entry.state) for state in SERVICE.states if state != "absent"})
            if entry.state == "absent":
                continue
            memory[label, "cells"] += int(entry.memory_mb * MIB)
            memory[label, "host"] += int(entry.host_mb * MIB)
            residue[label] += int(entry.memory_mb * MIB) if entry.state == "host" else 0
        yield gauge_family("tangram_service_instances", states.items())
        yield gauge_family("tangram_service_memory_bytes", memory.items())
        yield gauge_family("tangram_service_residue_bytes", (((label,), value) for label, value in residue.items()))
