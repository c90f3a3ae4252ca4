"""The metrics of a scheduler: they count the entries of its journal, and show the state of its core.

`SchedulerMetrics` exists once in a process, and its counters outlive a change of leaders. While the scheduler leads, `lead` gives the
journal through which its entries pass: each is counted once the real journal has it. All that is a count, a queue or a grant comes
from there. What no entry says, beats and quotas, comes from `looked`, which the scheduler calls at each housekeeping.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.metrics.bounded import Jobs, Names
from app.metrics.exposition import make_registry, serve
from app.metrics.families import FAMILIES, counter, gauge, gauge_family, histogram
from app.metrics.ledger import Group, Known, Ledger
from app.metrics.services import MIB, Services
from scheduler.core.core import Core
from scheduler.live.entries import (
    ActionEnded,
    ActionGranted,
    ActionReceived,
    ActionRequeued,
    ActionResized,
    Entry,
    EnvironmentChanged,
    InstanceChanged,
    InstancesForgotten,
    Journal,
    NodeChanged,
    Unfinished,
)
from scheduler.model.commands import NoteDraining
from scheduler.model.lifecycle import NODE_HELD
from tangram.ends import fault_of_end
from tangram.settings import Settings

PARTS = ("queue_s", "background_s", "overhead_s", "execution_s")
RATIO_BINS = (-24, -16, -8, -4, -2, 1, 3, 7, 15, 23)
"""Upper edges of `tangram_prediction_ratio`, in eighths of a doubling: from an eighth to eight times what was expected."""

_SUMS = "tangram_granted_unit_seconds_total", "tangram_used_core_seconds_total"


class SchedulerMetrics(Collector):
    """The figures of one scheduler process. `observe` and `looked` belong to the scheduler's thread, `collect` to a scrape."""

    def __init__(self, registry: CollectorRegistry, most_jobs: int) -> None:
        """Start at nought, standing by."""
        self._lock = threading.Lock()
        self._by_job = {
            name: counter(name, registry) if family.kind == "counter" else histogram(name, registry)
            for name, family in FAMILIES.items()
            if family.process == "scheduler" and "job_name" in family.labels and family.kind != "gauge"
        }
        self._parts: dict[Group, tuple[Histogram, ...]] = {}
        self._plain = {
            name: counter(name, registry)
            for name, family in FAMILIES.items()
            if family.process == "scheduler" and family.kind == "counter" and name not in self._by_job and "service" not in family.labels
        }
        self._decision = histogram("tangram_decision_seconds", registry)
        self._write = histogram("tangram_journal_write_seconds", registry)
        self._leading = gauge("tangram_scheduler_leading", registry)
        self._epoch = gauge("tangram_scheduler_epoch", registry)
        self._set_aside = gauge("tangram_messages_set_aside", registry)
        self._looked_at = gauge("tangram_scheduler_looked_timestamp_seconds", registry)
        self._services = Services(registry)
        self._jobs, self._kinds = Jobs(most_jobs, self._forget_job), Names()
        self._ledger = Ledger()
        self._beats: dict[str, float] = {}
        self._missed: dict[str, int] = {}
        self._quotas: dict[str, tuple[int, int | None, float]] = {}
        self._memory: dict[str, dict[str, Any]] = {}
        self._ratios: tuple[int, ...] = ()
        registry.register(self)

    # The scheduler's thread

    def lead(self, journal: Journal, epoch: int) -> ObservedJournal:
        """Begin to lead; return the journal that the scheduler is to write to."""
        self._leading.set(1)
        self._epoch.set(epoch)
        return ObservedJournal(journal, self)

    def stand_by(self) -> None:
        """Lead no longer: what waits and runs is another scheduler's to tell."""
        with self._lock:
            self._leading.set(0)
            self._epoch.set(0)
            self._ledger = Ledger()
            self._jobs.leave_all()
            for node in self._beats:
                self._services.node_gone(node)
            self._beats, self._missed, self._quotas, self._memory = {}, {}, {}, {}

    def decided(self, seconds: float) -> None:
        """Note the time that an event took which led to decisions."""
        self._decision.observe(seconds)

    def looked(self, core: Core, now: float) -> None:
        """Take what no entry says from the core."""
        state = core.state
        self._looked_at.set(now)
        beats = {name: node.last_beat for name, node in state.nodes.items()}
        accounts = {account.name: account for account in core.pools.quotas.accounts.values()}
        quotas = {name: (one.running, one.spec.concurrency, one.throttle.factor) for name, one in accounts.items()}
        for name, beat_at in beats.items():
            # Half an interval late is not missed yet.
            missed = max(0, int((now - beat_at) / state.limits.beat_s - 0.5)) if state.limits.beat_s else 0
            if missed > self._missed.get(name, 0):
                self._plain["tangram_node_beats_missed_total"].labels(node=name).inc(missed - self._missed.get(name, 0))
            self._missed[name] = missed
        memory = {name: said for name in beats if (said := core.memory.books.shown(name, now)) is not None}
        with self._lock:
            self._beats, self._quotas, self._ratios, self._memory = beats, quotas, state.durations.ratios(), memory

    def resume(self, unfinished: Unfinished) -> None:
        """Take over what had not ended."""
        self._set_aside.set(len(unfinished.set_aside))
        with self._lock:
            for node in unfinished.nodes:
                self._ledger.change_node(node)
            for name in unfinished.draining:
                self._ledger.drain(name, draining=True)
            for environment in unfinished.environments:
                self._ledger.change_environment(environment)
            for action in unfinished.actions:
                self._receive(action)
                if action.grant is not None:
                    self._ledger.grant(action.id, action.grant)

    def observe(self, entries: Sequence[Entry], write_s: float) -> None:
        """Count entries that are in the journal, and the time that it took."""
        self._write.observe(write_s)
        with self._lock:
            for entry in entries:
                self._count(entry)

    def _count(self, entry: Entry) -> None:
        match entry:
            case ActionReceived():
                group = self._receive(entry)
                self._counter("tangram_actions_received_total", group).inc()
            case ActionGranted():
                if (known := self._ledger.grant(entry.id, entry)) is not None:
                    self._plain["tangram_grants_total"].labels(known.group[1]).inc()
            case ActionResized():
                if (resized := self._ledger.resize(entry)) is not None:
                    self._plain["tangram_resizes_total"].labels(resized[1]).inc()
                    if resized[1] == "preempt":
                        self._counter("tangram_preemptions_total", resized[0].group[:1]).inc()
            case ActionRequeued():
                if (known := self._ledger.requeue(entry.id)) is not None:
                    self._plain["tangram_requeues_total"].labels(known.group[1]).inc()
            case ActionEnded():
                if (known := self._ledger.end(entry.end.id)) is not None:
                    self._end(known, entry)
            case EnvironmentChanged():
                if self._ledger.change_environment(entry):
                    self._plain["tangram_environments_ended_total"].labels(entry.state).inc()
            case NodeChanged():
                self._change_node(entry)
            case NoteDraining():
                self._ledger.drain(entry.name, draining=entry.draining)
            case InstanceChanged():
                self._services.change(entry)
            case InstancesForgotten():
                self._services.forget(entry)

    def _receive(self, action: ActionReceived) -> Group:
        job = self._jobs.enter(str(action.header.get("job") or ""), action.received_at)
        group = job, self._kinds.label(str(action.header.get("kind") or ""))
        self._ledger.receive(action.id, group, action.submitted_at, str(action.header.get("environment") or ""))
        self._parts_of(group)
        return group

    def _end(self, known: Known, entry: ActionEnded) -> None:
        end, group = entry.end, known.group
        parts = self._parts_of(group)
        for part, seconds in zip(parts, (end.act_s, *(getattr(end, one) for one in PARTS)), strict=True):
            part.observe(seconds)
        fault = fault_of_end(end.kind, end.cause)
        self._counter("tangram_actions_total", (*group, end.status, fault)).inc()
        if fault == "infrastructure":
            self._counter("tangram_infra_failed_total", (*group, end.cause)).inc()
        for name, seconds in zip(_SUMS, (end.unit_s, end.cpu_s), strict=True):
            self._counter(name, group[:1]).inc(max(0.0, seconds))
        self._jobs.leave(group[0], entry.at)

    def _parts_of(self, group: Group) -> tuple[Histogram, ...]:
        """Return the histograms of a group's ACT and its parts, made with the first action of the group."""
        if (known := self._parts.get(group)) is not None:
            return known
        names = ("tangram_act_seconds", *(f"tangram_act_{part.removesuffix('_s')}_seconds" for part in PARTS))
        found = []
        for name in names:
            family = self._by_job[name]
            assert isinstance(family, Histogram)
            found.append(family.labels(*group))
        for status in ("failed", "lost", "timed_out"):  # a rate needs to see them at nought before the first one ends so
            self._counter("tangram_actions_total", (*group, status, "infrastructure"))
        self._parts[group] = tuple(found)
        return self._parts[group]

    def _counter(self, name: str, labels: Sequence[str]) -> Counter:
        family = self._by_job[name]
        assert isinstance(family, Counter)
        return family.labels(*labels)

    def _change_node(self, entry: NodeChanged) -> None:
        self._ledger.change_node(entry)
        if entry.state in NODE_HELD:
            self._plain["tangram_node_beats_missed_total"].labels(entry.name)  # a rate needs to see it at nought first
            return
        self._services.node_gone(entry.name)
        self._missed.pop(entry.name, None)
        self._plain["tangram_node_beats_missed_total"].remove_by_labels({"node": entry.name})
        if entry.state == "lost":
            self._plain["tangram_nodes_lost_total"].inc()

    def _forget_job(self, job: str) -> None:
        self._ledger.forget_job(job)
        self._parts = {group: parts for group, parts in self._parts.items() if group[0] != job}
        for family in self._by_job.values():
            family.remove_by_labels({"job_name": job})

    # A scrape

    def collect(self) -> Iterable[Metric]:
        """Return what is so now."""
        with self._lock:
            return [*self._of_actions(time.time()), *self._of_nodes(time.time()), *self._services.gauges(), self._prediction()]

    def _of_actions(self, now: float) -> Iterable[Metric]:
        ledger = self._ledger
        waiting, age = gauge_family("tangram_actions_waiting"), gauge_family("tangram_queue_oldest_age_seconds")
        running, environments = gauge_family("tangram_actions_running"), gauge_family("tangram_environments")
        for group, queue in ledger.queues.items():
            oldest = queue.oldest()
            waiting.add_metric(group, len(queue))
            age.add_metric(group, 0.0 if oldest is None else max(0.0, now - oldest))
            running.add_metric(group, ledger.running[group])
        states = list(ledger.environments.values())
        for state in ("waiting", "opening", "open", "closing"):
            environments.add_metric([state], states.count(state))
        return waiting, age, running, environments

    def _of_nodes(self, now: float) -> Iterable[Metric]:
        units, nodes, beats = (
            gauge_family("tangram_node_units"),
            gauge_family("tangram_nodes"),
            gauge_family("tangram_node_beat_age_seconds"),
        )
        for node, resource, state, count in self._ledger.units():
            units.add_metric([node, resource, state], count)
        silent, draining = gauge_family("tangram_nodes_silent"), gauge_family("tangram_nodes_draining")
        nodes.add_metric([], len(self._ledger.nodes.keys() - self._ledger.silent))
        silent.add_metric([], len(self._ledger.silent))
        draining.add_metric([], len(self._ledger.draining & self._ledger.nodes.keys()))
        for node, beat_at in self._beats.items():
            beats.add_metric([node], max(0.0, now - beat_at))
        memory, paused = gauge_family("tangram_node_memory_bytes"), gauge_family("tangram_node_memory_paused")
        for node, said in self._memory.items():
            for what in ("granted", "held", "reserve"):
                memory.add_metric([node, what], said[f"{what}_mb"] * MIB)
            paused.add_metric([node], said["paused_count"])
        requests, concurrency = gauge_family("tangram_quota_requests"), gauge_family("tangram_quota_concurrency")
        speed = gauge_family("tangram_quota_speed_ratio")
        for quota, (running, most, factor) in self._quotas.items():
            requests.add_metric([quota], running)
            speed.add_metric([quota], factor)
            if most is not None:
                concurrency.add_metric([quota], most)
        return units, nodes, silent, draining, beats, memory, paused, requests, concurrency, speed

    def _prediction(self) -> Metric:
        family = HistogramMetricFamily("tangram_prediction_ratio", FAMILIES["tangram_prediction_ratio"].help)
        offs = range(-80, -80 + len(self._ratios))
        counts = dict(zip(offs, self._ratios, strict=True))
        total = sum(self._ratios)
        # The bin i holds ratios from 2 ** ((i - 1/2) / 8) to 2 ** ((i + 1/2) / 8).
        edges = [(f"{2 ** ((edge + 0.5) / 8):.3g}", float(sum(n for off, n in counts.items() if off <= edge))) for edge in RATIO_BINS]
        mean_sum = sum(n * 2.0 ** (off / 8) for off, n in counts.items())
        family.add_metric([], [*edges, ("+Inf", float(total))], sum_value=mean_sum)
        return family


class ObservedJournal:
    """A journal whose entries are counted once it has them."""

    def __init__(self, journal: Journal, metrics: SchedulerMetrics) -> None:
        self._journal = journal
        self._metrics = metrics

    def write(self, entries: Sequence[Entry]) -> None:
        """Commit `entries`, then count them."""
        began = time.perf_counter()
        self._journal.write(entries)
        self._metrics.observe(entries, time.perf_counter() - began)

    def unfinished(self) -> Unfinished:
        """Load what had not ended."""
        unfinished = self._journal.unfinished()
        self._metrics.resume(unfinished)
        return unfinished

    def has_ended(self, action_id: str) -> bool:
        """Ask the journal."""
        return self._journal.has_ended(action_id)


def start(settings: Settings) -> SchedulerMetrics:
    """Serve the metrics of a scheduler process."""
    registry = make_registry(settings, "scheduler")
    metrics = SchedulerMetrics(registry, settings.metrics_jobs)
    serve(settings, registry)
    return metrics
