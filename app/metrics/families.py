"""Every metric of the system, declared once: the processes make theirs from this table, and `docs/metrics.md` shows it.

Names follow the conventions of Prometheus: base units, `_total` for counters. The label of a job is `job_name`, since Prometheus
itself puts a label `job` on what it reads. No label holds an id of an action, a trajectory or an environment. Values that users choose are
bounded (`bounded.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily

ProcessKind = Literal["every", "scheduler", "worker", "gateway", "web", "metrics"]
Kind = Literal["counter", "gauge", "histogram"]

ACT_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3600.0)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
DECISION_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: the process that has it, its labels, and its buckets where it is a histogram."""

    process: ProcessKind
    kind: Kind
    name: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


def _table() -> tuple[Family, ...]:
    job, action = ("job_name",), ("job_name", "kind")
    return (
        Family("every", "gauge", "tangram_build_info", ("version", "process"), "1, with the version and the kind of process."),
        Family("every", "gauge", "tangram_disk_free_bytes", (), "Free bytes of the file system that holds the state folder."),
        Family("every", "gauge", "tangram_disk_size_bytes", (), "Size of the file system that holds the state folder."),
        # Actions
        Family("scheduler", "histogram", "tangram_act_seconds", action, "Submission to result of ended actions.", ACT_S),
        Family("scheduler", "histogram", "tangram_act_queue_seconds", action, "Queueing part of the ACT.", ACT_S),
        Family("scheduler", "histogram", "tangram_act_background_seconds", action, "Background part of the ACT.", ACT_S),
        Family("scheduler", "histogram", "tangram_act_overhead_seconds", action, "Overhead part of the ACT.", ACT_S),
        Family("scheduler", "histogram", "tangram_act_execution_seconds", action, "Execution part of the ACT.", ACT_S),
        Family("scheduler", "counter", "tangram_actions_received_total", action, "Actions that came in."),
        Family("scheduler", "counter", "tangram_actions_total", (*action, "status", "fault"), "Ended actions; fault is whose it was."),
        Family("scheduler", "counter", "tangram_infra_failed_total", (*action, "cause"), "Actions that failed by a fault of the system."),
        Family("scheduler", "gauge", "tangram_actions_waiting", action, "Actions that wait."),
        Family("scheduler", "gauge", "tangram_actions_running", action, "Actions that hold a grant."),
        Family("scheduler", "gauge", "tangram_queue_oldest_age_seconds", action, "Time since submission of the action that waits longest."),
        Family("scheduler", "counter", "tangram_requeues_total", ("kind",), "Granted actions that went back to the queue."),
        # Grants
        Family("scheduler", "counter", "tangram_grants_total", ("kind",), "Grants given."),
        Family("scheduler", "counter", "tangram_resizes_total", ("direction",), "Grants changed: grow, shrink, preempt or resume."),
        Family("scheduler", "counter", "tangram_preemptions_total", job, "Running commands whose cores were taken."),
        Family("scheduler", "counter", "tangram_granted_unit_seconds_total", job, "Core- and cell-seconds that ended actions held."),
        Family("scheduler", "counter", "tangram_used_core_seconds_total", job, "Core-seconds that ended commands used."),
        Family(
            "scheduler",
            "gauge",
            "tangram_node_units",
            ("node", "resource", "state"),
            "Cores and cells of nodes that are up: granted, or idle. Cores of a pod are granted while its environment stands.",
        ),
        Family("scheduler", "gauge", "tangram_quota_requests", ("quota",), "Requests to the account of a quota that are under way."),
        Family("scheduler", "gauge", "tangram_quota_concurrency", ("quota",), "Requests that the account allows at once, where limited."),
        Family("scheduler", "gauge", "tangram_quota_speed_ratio", ("quota",), "Part of the account's rate used since its last refusals."),
        # Nodes and environments
        Family("scheduler", "gauge", "tangram_nodes", (), "Nodes that are up."),
        Family("scheduler", "gauge", "tangram_nodes_silent", (), "Silent nodes, which are not lost yet."),
        Family("scheduler", "gauge", "tangram_nodes_draining", (), "Nodes that are up and take nothing new."),
        Family("scheduler", "counter", "tangram_nodes_lost_total", (), "Nodes that were lost."),
        Family("scheduler", "gauge", "tangram_node_beat_age_seconds", ("node",), "Time since the last beat of a node that is up."),
        Family(
            "scheduler", "gauge", "tangram_node_memory_bytes", ("node", "what"), "Memory by action: granted, held after actions, reserve."
        ),
        Family("scheduler", "gauge", "tangram_node_memory_paused", ("node",), "Environments that are paused for want of memory."),
        Family("scheduler", "counter", "tangram_node_beats_missed_total", ("node",), "Beats of a node that did not come in time."),
        Family("scheduler", "gauge", "tangram_environments", ("state",), "Environments by state."),
        Family("scheduler", "counter", "tangram_environments_ended_total", ("state",), "Environments that were closed or lost."),
        # Services
        Family("scheduler", "gauge", "tangram_service_instances", ("service", "state"), "Instances of a service by state."),
        Family("scheduler", "gauge", "tangram_service_residue_bytes", ("service",), "Device memory that instances in host memory keep."),
        Family(
            "scheduler", "gauge", "tangram_service_memory_bytes", ("service", "where"), "Memory of instances: on cells, in host memory."
        ),
        Family("scheduler", "counter", "tangram_service_starts_total", ("service",), "Starts of instances."),
        Family("scheduler", "counter", "tangram_service_restores_total", ("service",), "Instances brought back from host memory."),
        Family("scheduler", "counter", "tangram_service_evictions_total", ("service",), "Instances thrown off their cells."),
        Family("scheduler", "counter", "tangram_service_leaks_total", ("service",), "Instances started anew since their residue grew."),
        Family(
            "scheduler", "counter", "tangram_service_wrong_answers_total", ("service",), "Canaries answered otherwise than at the start."
        ),
        # The scheduler itself
        Family("scheduler", "gauge", "tangram_scheduler_leading", (), "1 where this scheduler leads, 0 where it stands by."),
        Family("scheduler", "gauge", "tangram_scheduler_epoch", (), "The epoch in which this scheduler leads."),
        Family("scheduler", "gauge", "tangram_scheduler_looked_timestamp_seconds", (), "When the loop last did its housekeeping."),
        Family("scheduler", "histogram", "tangram_decision_seconds", (), "Time of an event that led to decisions.", DECISION_S),
        Family("scheduler", "histogram", "tangram_journal_write_seconds", (), "Time of a group commit.", DECISION_S),
        Family("scheduler", "histogram", "tangram_prediction_ratio", (), "Work of succeeded actions over the work expected of them."),
        Family("scheduler", "gauge", "tangram_messages_set_aside", (), "Messages on which schedulers failed, when this one began to lead."),
        # Workers
        Family("worker", "gauge", "tangram_worker_actions_running", ("kind",), "Actions that this worker runs."),
        Family("worker", "counter", "tangram_worker_actions_total", ("kind", "status"), "Tries of actions that ended on this worker."),
        Family("worker", "histogram", "tangram_worker_execution_seconds", ("kind",), "Execution of these tries.", ACT_S),
        Family("worker", "counter", "tangram_worker_cpu_seconds_total", ("kind",), "Core-seconds that they used."),
        Family("worker", "gauge", "tangram_worker_environments", (), "Environments that stand on this worker."),
        # Servers of HTTP
        Family(
            "gateway", "counter", "tangram_gateway_infra_failed_total", ("shape", "cause"), "Calls that failed by a fault of the system."
        ),
        Family("gateway", "histogram", "tangram_gateway_loop_lag_seconds", (), "How late the event loop ran a timer.", LAG_S),
        Family("web", "histogram", "tangram_web_loop_lag_seconds", (), "How late the event loop ran a timer.", LAG_S),
        # Celery's events, by the names of the usual exporter
        *(
            Family("metrics", "counter", f"celery_task_{event}_total", ("name", "hostname"), f"Celery's event task-{event}.")
            for event in ("received", "started", "succeeded", "retried", "revoked", "rejected")
        ),
        Family("metrics", "counter", "celery_task_failed_total", ("name", "hostname", "exception"), "Celery's event task-failed."),
        Family("metrics", "histogram", "celery_task_runtime", ("name", "hostname"), "Seconds that Celery counts for a task.", ACT_S),
        Family("metrics", "gauge", "celery_worker_up", ("hostname",), "1 while the worker's events say that it is there."),
        Family("metrics", "gauge", "celery_worker_tasks_active", ("hostname",), "Tasks that the worker runs, as its heartbeat says."),
        Family("metrics", "gauge", "celery_queue_length", ("queue_name",), "Messages in a queue of the broker."),
    )


FAMILIES: dict[str, Family] = {family.name: family for family in _table()}


def counter(name: str, registry: CollectorRegistry) -> Counter:
    """Return a new counter of the table, in a registry."""
    family = _find(name, "counter")
    return Counter(name, family.help, family.labels, registry=registry)


def gauge(name: str, registry: CollectorRegistry) -> Gauge:
    """Return a new gauge of the table, in a registry."""
    family = _find(name, "gauge")
    return Gauge(name, family.help, family.labels, registry=registry)


def histogram(name: str, registry: CollectorRegistry) -> Histogram:
    """Return a new histogram of the table, in a registry."""
    family = _find(name, "histogram")
    return Histogram(name, family.help, family.labels, buckets=family.buckets, registry=registry)


def gauge_family(name: str, values: Iterable[tuple[Sequence[str], float]] = ()) -> GaugeMetricFamily:
    """Return a gauge of the table as a scrape gets it, with `values` by their labels."""
    family = _find(name, "gauge")
    found = GaugeMetricFamily(name, family.help, labels=family.labels)
    for labels, value in values:
        found.add_metric(labels, value)
    return found


def _find(name: str, kind: Kind) -> Family:
    family = FAMILIES[name]
    assert family.kind == kind, f"{name} is a {family.kind}"
    return family
