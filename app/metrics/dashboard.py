"""Writes Grafana's dashboard: `python -m app.metrics.dashboard > docs/monitoring/grafana/tangram.json`.

A row is a heading and its panels, a panel a title, a unit, what it shows, and its queries with their legends. `$jobs` in a query stands for
the choice of jobs that a viewer makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 39
COLUMNS, WIDTH, HEIGHT = 24, 8, 8
STAT_WIDTH, STAT_HEIGHT = 4, 4
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
JOBS = 'job_name=~"$job_name"'
WINDOW = "[$__rate_interval]"

Unit = Literal["s", "short", "ops", "percentunit", "bytes", "none"]


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph, or one figure where it is a `stat`."""

    title: str
    unit: Unit
    description: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    stat: bool = False


def _rate(name: str, by: str, where: str = JOBS) -> str:
    return f"sum by ({by}) (rate({name}{{{where}}}{WINDOW}))"


def _mean(name: str, by: str, where: str = JOBS) -> str:
    return f"{_rate(f'{name}_sum', by, where)} / {_rate(f'{name}_count', by, where)}"


def _quantile(quantile: float, name: str, by: str = "", where: str = JOBS) -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{name}_bucket', f'le, {by}' if by else 'le', where)})"


def _stat(title: str, unit: Unit, description: str, query: str) -> Panel:
    return Panel(title, unit, description, ((query, title),), stat=True)


def _graph(title: str, unit: Unit, description: str, *queries: tuple[str, str], stacked: bool = False) -> Panel:
    return Panel(title, unit, description, queries, stacked)


def _units(resource: str, state: str) -> str:
    return f'sum(tangram_node_units{{resource="{resource}",state="{state}"}})'


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "At a glance",
        (
            _stat("Leading schedulers", "none", "One, always; 0 means that nothing is scheduled.", "sum(tangram_scheduler_leading)"),
            Panel(
                "Nodes",
                "none",
                "Nodes that are up, those of them that are draining, and nodes that are silent.",
                (("sum(tangram_nodes)", "up"), ("sum(tangram_nodes_draining)", "draining"), ("sum(tangram_nodes_silent)", "silent")),
                stat=True,
            ),
            _stat("Waiting", "short", "Actions that wait.", f"sum(tangram_actions_waiting{{{JOBS}}})"),
            _stat("Running", "short", "Actions that hold a grant.", f"sum(tangram_actions_running{{{JOBS}}})"),
            _stat("Longest wait", "s", "Age of the action that waits longest.", f"max(tangram_queue_oldest_age_seconds{{{JOBS}}})"),
            _stat(
                "Failed by us",
                "percentunit",
                "Part of the actions of the last ten minutes that failed by a fault of the system.",
                "sum(rate(tangram_actions_total{fault='infrastructure'}[10m])) / sum(rate(tangram_actions_total[10m]))",
            ),
        ),
    ),
    (
        "Action completion time",
        (
            _graph("Mean ACT by job", "s", "Submission to result.", (_mean("tangram_act_seconds", "job_name"), "{{job_name}}")),
            _graph(
                "ACT, percentiles",
                "s",
                "Over all kinds of actions of these jobs.",
                *((_quantile(part, "tangram_act_seconds"), f"p{100 * part:g}") for part in (0.5, 0.95, 0.99)),
            ),
            _graph(
                "Parts of the ACT",
                "s",
                "Means of queueing, background, overhead and execution; they add up to the ACT.",
                *((_mean(f"tangram_act_{part}_seconds", ""), part) for part in ("queue", "background", "overhead", "execution")),
                stacked=True,
            ),
            _graph("Mean ACT by kind", "s", "Submission to result.", (_mean("tangram_act_seconds", "kind"), "{{kind}}")),
            _graph("Ended actions", "ops", "By their end.", (_rate("tangram_actions_total", "status"), "{{status}}"), stacked=True),
            _graph("Received actions", "ops", "By job.", (_rate("tangram_actions_received_total", "job_name"), "{{job_name}}")),
        ),
    ),
    (
        "Queue",
        (
            _graph(
                "Waiting by job and kind",
                "short",
                "By job and kind.",
                (f"sum by (job_name, kind) (tangram_actions_waiting{{{JOBS}}})", "{{job_name}} {{kind}}"),
                stacked=True,
            ),
            _graph(
                "Age of the oldest",
                "s",
                "Since its submission, by job and kind.",
                (f"max by (job_name, kind) (tangram_queue_oldest_age_seconds{{{JOBS}}})", "{{job_name}} {{kind}}"),
            ),
            _graph(
                "Grants and returns",
                "ops",
                "Grants given, and granted actions that wait again.",
                *((_rate(f"tangram_{what}_total", "kind", ""), f"{what} {{{{kind}}}}") for what in ("grants", "requeues")),
            ),
        ),
    ),
    (
        "Cores, cells and quotas",
        (
            _graph(
                "Cores",
                "short",
                "Granted and idle cores of all nodes; used are the core-seconds of ended commands.",
                (_units("cores", "granted"), "granted"),
                (_units("cores", "idle"), "idle"),
                (f"sum(rate(tangram_used_core_seconds_total{WINDOW}))", "used"),
            ),
            _graph(
                "Cells",
                "short",
                "Granted and idle GPU cells of all nodes.",
                (_units("cells", "granted"), "granted"),
                (_units("cells", "idle"), "idle"),
            ),
            _graph("Utilisation", "percentunit", "Granted part of the units.", ("tangram:utilisation:ratio", "{{resource}}")),
            _graph(
                "Held by job",
                "short",
                "Cores and cells that its ended actions held.",
                (_rate("tangram_granted_unit_seconds_total", "job_name"), "{{job_name}}"),
                stacked=True,
            ),
            _graph("Resizes", "ops", "Changes of running grants.", (_rate("tangram_resizes_total", "direction", ""), "{{direction}}")),
            _graph(
                "Preemptions", "ops", "Commands whose cores were taken.", (_rate("tangram_preemptions_total", "job_name"), "{{job_name}}")
            ),
            _graph(
                "Quota requests",
                "short",
                "Requests under way, and what the account allows at once.",
                ("max by (quota) (tangram_quota_requests)", "{{quota}}"),
                ("max by (quota) (tangram_quota_concurrency)", "{{quota}} limit"),
            ),
            _graph(
                "Quota speed",
                "percentunit",
                "Below 1 the API has refused requests lately.",
                ("min by (quota) (tangram_quota_speed_ratio)", "{{quota}}"),
            ),
        ),
    ),
    (
        "Failures",
        (
            _graph("Failed by us, by cause", "ops", "By cause.", (_rate("tangram_infra_failed_total", "cause"), "{{cause}}"), stacked=True),
            _graph("Part failed by us", "percentunit", "By job.", ("tangram:infra_failed:ratio10m", "{{job_name}}")),
            _graph(
                "Ends by fault", "ops", "Whose fault the ends were; empty for none.", (_rate("tangram_actions_total", "fault"), "{{fault}}")
            ),
            _graph("Lost nodes", "short", "Within ten minutes.", ("sum(increase(tangram_nodes_lost_total[10m]))", "lost")),
            _graph("Beats", "s", "Time since the last beat of each node.", ("max by (node) (tangram_node_beat_age_seconds)", "{{node}}")),
            _graph("Missed beats", "ops", "By node.", (_rate("tangram_node_beats_missed_total", "node", ""), "{{node}}")),
        ),
    ),
    (
        "Services",
        (
            _graph(
                "Instances",
                "short",
                "By state.",
                ("sum by (service, state) (tangram_service_instances)", "{{service}} {{state}}"),
                stacked=True,
            ),
            _graph(
                "Memory",
                "bytes",
                "Measured, on cells and in host memory; residue is what instances in host memory keep of cells.",
                ("sum by (service, where) (tangram_service_memory_bytes)", "{{service}} {{where}}"),
                ("sum by (service) (tangram_service_residue_bytes)", "{{service}} residue"),
            ),
            _graph(
                "Swaps",
                "ops",
                "Starts, restores and evictions.",
                *(
                    (_rate(f"tangram_service_{what}_total", "service", ""), f"{{{{service}}}} {what}")
                    for what in ("starts", "restores", "evictions")
                ),
            ),
            _graph(
                "Wrong answers and leaks",
                "short",
                "Within an hour; each is a service that was started anew.",
                *(
                    (f"sum by (service) (increase(tangram_service_{what}_total[1h]))", f"{{{{service}}}} {what}")
                    for what in ("wrong_answers", "leaks")
                ),
            ),
        ),
    ),
    (
        "Environments",
        (
            _graph("Environments", "short", "By state.", ("sum by (state) (tangram_environments)", "{{state}}"), stacked=True),
            _graph(
                "Time to open",
                "s",
                "ACT of cpu.open.",
                *((_quantile(part, "tangram_act_seconds", where='kind="cpu.open"'), f"p{100 * part:g}") for part in (0.5, 0.95)),
            ),
            _graph("Ended environments", "ops", "Closed or lost.", (_rate("tangram_environments_ended_total", "state", ""), "{{state}}")),
        ),
    ),
    (
        "Processes",
        (
            _graph(
                "Decisions",
                "s",
                "Time of an event that led to decisions.",
                *((_quantile(part, "tangram_decision_seconds", where=""), f"p{100 * part:g}") for part in (0.5, 0.99)),
            ),
            _graph(
                "Journal",
                "s",
                "Time of a group commit.",
                *((_quantile(part, "tangram_journal_write_seconds", where=""), f"p{100 * part:g}") for part in (0.5, 0.99)),
            ),
            _graph(
                "Prediction",
                "none",
                "Work over what was expected: 1 is right, 2 twice as much.",
                *((_quantile(part, "tangram_prediction_ratio", where=""), f"p{100 * part:g}") for part in (0.1, 0.5, 0.9)),
            ),
            _graph(
                "Event-loop lag",
                "s",
                "p99, of the gateway and of the live page.",
                (_quantile(0.99, "tangram_gateway_loop_lag_seconds", "instance", ""), "{{instance}}"),
                (_quantile(0.99, "tangram_web_loop_lag_seconds", "instance", ""), "{{instance}}, live page"),
            ),
            _graph(
                "CPU",
                "short",
                "Cores that each process uses itself.",
                (f"sum by (process_name, instance) (rate(process_cpu_seconds_total{WINDOW}))", "{{process_name}} {{instance}}"),
            ),
            _graph(
                "Memory of processes",
                "bytes",
                "Resident memory of each process.",
                ("sum by (process_name, instance) (process_resident_memory_bytes)", "{{process_name}} {{instance}}"),
            ),
            _graph(
                "Free disk",
                "percentunit",
                "Of the state folder's file system.",
                ("min by (process_name, instance) (tangram_disk_free_bytes / tangram_disk_size_bytes)", "{{process_name}} {{instance}}"),
            ),
            _graph("Broker queues", "short", "Messages that wait there.", ("max by (queue_name) (celery_queue_length)", "{{queue_name}}")),
            _graph(
                "Celery tasks",
                "ops",
                "As Celery's own events tell.",
                *((_rate(f"celery_task_{what}_total", "name", ""), f"{what} {{{{name}}}}") for what in ("succeeded", "failed")),
            ),
        ),
    ),
)


def document() -> dict[str, Any]:
    """Return the dashboard as Grafana takes it."""
    query = "label_values(tangram_actions_received_total, job_name)"
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0, "refresh": 1},
        {
            "name": "job_name",
            "label": "Job",
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": "job_name"},
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"selected": True, "text": "All", "value": "$__all"},
            "hide": 0,
            "refresh": 2,
            "sort": 1,
        },
    ]
    return {
        "uid": "arl-tangram",
        "title": "ARL-Tangram",
        "description": "Actions, grants, failures and processes of a deployment of ARL-Tangram.",
        "tags": ["tangram"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables},
        "annotations": {"list": []},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Yield headings and panels, laid out in rows from left to right."""
    number, y = 0, 0
    for heading, panels in ROWS:
        number += 1
        yield {"id": number, "type": "row", "title": heading, "collapsed": False, "panels": [], "gridPos": _at(0, y, COLUMNS, 1)}
        x, y = 0, y + 1
        for panel in panels:
            width, height = (STAT_WIDTH, STAT_HEIGHT) if panel.stat else (WIDTH, HEIGHT)
            if x + width > COLUMNS:
                x, y = 0, y + height
            number += 1
            yield _panel(number, panel, _at(x, y, width, height))
            x += width
        y += height


def _panel(number: int, panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    drawn = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if panel.stacked else 5, "showPoints": "never"}
    stacking = {"group": "A", "mode": "normal" if panel.stacked else "none"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
    if not panel.stat:
        defaults["custom"] = {**drawn, "stacking": stacking}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for place, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
