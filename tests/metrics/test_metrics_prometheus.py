"""A stack under load, its metrics read by a real Prometheus: every query of the dashboard, the rules and the alerts has an answer."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from app.local.stack import StackPlan
from app.metrics.families import FAMILIES
from tangram.action import Action, Cost
from tests.live.support import FAST_BEATS, SERVICES, Live, running
from tests.metrics.load import loaded
from tests.metrics.prometheus import MONITORING, Prometheus, running_prometheus, tool
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(900)

DASHBOARD = MONITORING / "grafana" / "tangram.json"
RUNNING_ON_IT = "select kind from actions where node = 'cpu-1' and status = 'running'"
VARIABLES = {"$job_name": ".*", "$__rate_interval": "1m"}


@dataclass(frozen=True)
class Watched:
    """A stack, and the Prometheus that reads it."""

    live: Live
    prometheus: Prometheus


@pytest.fixture(scope="module")
def watched(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Run a stack with every kind of process, load it, and have a node die under the load."""
    tool("prometheus")
    folder = tmp_path_factory.mktemp("metrics")
    services = folder / "services.toml"
    services.write_text(SERVICES)
    port = free_ports(13)
    plan = StackPlan(
        nodes=2,
        cores=2,
        memory_mb=4096,
        cells=1,
        cell_memory_mb=700,
        services_file=services,
        gateway_port=port + 11,
        web_port=port + 12,
        metrics_port=port,
        include=("tests.metrics.changed_answers", "tests.live.live_tasks"),
        variables=FAST_BEATS,
    )
    with running(folder / "state", plan) as live, running_prometheus(folder / "prometheus", live.stack.metrics_file) as prometheus:
        watched = Watched(live, prometheus)
        go = folder / "go"
        with live.client("alpha") as client, loaded(live):
            # What waits for this file may be run again, so it is what is queued anew.
            marks = [client.submit(_mark(folder / "marks", go)) for _ in range(3)]
            # Prometheus must have seen all well, or nothing has grown since; and a command is lost with its environment.
            live.until(lambda: prometheus.values("tangram_nodes == 4"), 300)
            lost = "tangram_actions_total{kind='cpu.exec', status='lost', fault='infrastructure'}"
            live.until(lambda: prometheus.values(f"count({lost}) == 2"), 300)  # of both jobs
            live.until(lambda: {"live.mark", "cpu.exec"} <= {kind for (kind,) in live.rows(RUNNING_ON_IT)}, 300)
            live.process("cpu-1").kill()
            live.until(lambda: prometheus.values("sum(tangram_requeues_total{kind='live.mark'}) > 0"), 300)
            go.touch()
            for mark in marks:
                mark.result(300)
            yield watched


def _mark(path: Path, go: Path) -> Action:
    """Return an action that may be run again, and waits for a file."""
    arguments = {"path": str(path), "word": "again", "until": str(go)}
    return Action(kind="live.mark", arguments=arguments, cost=Cost.of(cores=1), idempotent=True)


def _queries_of_the_dashboard() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for name, value in VARIABLES.items():
        found = [query.replace(name, value) for query in found]
    assert not any("$" in query for query in found)
    return found


def _queries_of_rules() -> list[str]:
    """Return what rules record and alerts compare, without what it is compared with."""
    files = [yaml.safe_load((MONITORING / name).read_text()) for name in ("rules.yml", "alerts.yml")]
    rules = [rule for file in files for group in file["groups"] for rule in group["rules"]]
    return [re.sub(r" (<|>|==) [0-9.]+(?= and|$)", "", rule["expr"].strip()) for rule in rules]


def test_every_query_is_answered_with_figures(watched: Watched) -> None:
    # Given a stack under load, of which a node was killed and a service answered wrongly
    unanswered = dict.fromkeys([*_queries_of_the_dashboard(), *_queries_of_rules()])
    assert len(unanswered) > 60

    # When Prometheus is asked until it has seen everything happen
    def all_answered() -> bool:
        for query in list(unanswered):
            if any(math.isfinite(value) for value in watched.prometheus.values(query)):
                del unanswered[query]
        return not unanswered

    try:
        watched.live.until(all_answered, 400)
    except AssertionError as error:
        raise AssertionError(f"no figures for {list(unanswered)}") from error


@pytest.mark.parametrize("alert", ["TangramNodeLost", "TangramWrongAnswers", "TangramInfraFailures", "TangramProcessUnreachable"])
def test_what_went_wrong_raises_its_alert(watched: Watched, alert: str) -> None:
    def raised() -> bool:
        return any(one["labels"]["alertname"] == alert for one in watched.prometheus.get("alerts")["alerts"])

    watched.live.until(raised, 400)


def test_the_page_of_every_process_follows_the_conventions_and_has_what_the_table_says(watched: Watched) -> None:
    # Given a process of each kind, once all that they count has happened
    parts = {"scheduler": "scheduler", "cpu-0": "worker", "gpu-0": "worker", "api-0": "worker", "gateway": "gateway", "metrics": "metrics"}
    missing: dict[str, set[str]] = {}

    def whole() -> bool:
        for name, part in parts.items():
            page = httpx.get(f"http://{watched.live.stack.metrics[name]}/metrics", timeout=30).text
            said = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
            missing[name] = {family.name for family in FAMILIES.values() if family.process in ("every", part)} - said
            ours = {one for one in said if one.startswith(("tangram_", "celery_"))}
            assert ours <= set(FAMILIES), ours - set(FAMILIES)
            # Then promtool finds nothing to say
            done = subprocess.run([tool("promtool"), "check", "metrics"], input=page, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), name
        return not any(left - {"tangram_worker_environments"} for left in missing.values())

    watched.live.until(whole, 200)
    assert "tangram_worker_environments" not in missing["cpu-0"]


def test_no_label_holds_an_id_or_grows_with_trajectories(watched: Watched) -> None:
    # Given the labels that Prometheus has seen
    for name in ("kind", "job_name", "status", "fault", "cause", "name", "exception"):
        values = watched.prometheus.get(f"label/{name}/values")
        # Then none names a trajectory, of which there have been many
        assert not [value for value in values if re.search(r"(alpha|beta)-\d|[0-9a-f]{16}", value)], name
    assert set(watched.prometheus.get("label/job_name/values")) == {"alpha", "beta"}


def test_rules_alerts_and_configuration_are_valid() -> None:
    for words in (("rules", "rules.yml", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run([tool("promtool"), "check", *words], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "FAILED" not in done.stdout


def test_rules_name_only_metrics_that_there_are() -> None:
    texts = [(MONITORING / name).read_text() for name in ("rules.yml", "alerts.yml")] + [DASHBOARD.read_text()]
    rules = yaml.safe_load(texts[0])["groups"][0]["rules"]
    used = {name for text in texts for name in re.findall(r"\b(?:tangram|celery)_[a-z_]+", text)}
    suffixes = {f"{name}{end}" for name, family in FAMILIES.items() for end in ("_bucket", "_sum", "_count") if family.kind == "histogram"}
    assert used <= set(FAMILIES) | suffixes, used - set(FAMILIES) - suffixes
    recorded = {rule["record"] for rule in rules}
    assert {name for text in texts for name in re.findall(r"tangram:[a-z0-9_:]+", text)} == recorded


def test_the_dashboard_is_laid_out_and_explained() -> None:
    # Given its panels
    panels = json.loads(DASHBOARD.read_text())["panels"]
    graphs = [panel for panel in panels if panel["type"] != "row"]
    # Then each has an id of its own, a title, a unit, a word of explanation, and takes its figures from the chosen source
    assert len({panel["id"] for panel in panels}) == len(panels) and len({panel["title"] for panel in graphs}) == len(graphs)
    for panel in graphs:
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    # And no two lie on each other
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    from app.metrics.page import table

    assert table() in (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
