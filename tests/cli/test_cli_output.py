"""Tables on a terminal: names are shown as they are, and figures are whole at any width."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.cli.environments import show_environments
from app.cli.output import show_report, show_state
from app.cli.top import fitting, keep_showing
from tests.cli.forked import forked

MARKUP = "[/x] [red]:smile:"
NODE = {
    "name": "n", "state": "up", "draining": False, "description": {"kinds": ["gpu"]}, "running": 0, "environments": 0, "shard": 0,
    "reason": "",
}  # fmt: skip
STATE = {"scheduler": None, "nodes": [NODE], "services": [], "actions": {}, "oldest_wait_s": 0.0, "set_aside": [], "infra_failed": {}}
INSTANCE = {
    "node": "n", "cells": [0, 1], "state": "resident", "reason": "", "memory_mb": 1200.4, "host_mb": 600.0, "running": 3,
    "starts": 1, "restores": 2, "evictions": 3, "leaks": 4, "wrong_answers": 5, "changed_at": 1.0,
}  # fmt: skip


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what shows something in a terminal of so many columns, and returns the text."""

    def in_terminal(columns: int, show: Callable[..., None], *what: Any) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        show(*what, as_json=False)
        return capsys.readouterr().out

    return in_terminal


def rows(shown: str) -> list[list[str]]:
    """Return the cells of the rows of a table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]


def test_a_replay_shows_a_job_whose_name_looks_like_markup(tmp_path: Path) -> None:
    action = {"kind": "cpu.exec", "units": [1], "work_s": 0.05, "command": "true"}
    line = {"schema": "tangram.trace/1", "steps": [{"think_s": 0, "action": action}]}
    lines = [json.dumps({**line, "trajectory": job, "job": job}) + "\n" for job in (MARKUP, "b")]
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    done = forked("replay", "trace.jsonl", "--simulate", "--cores", "1", cwd=tmp_path, COLUMNS="120")
    assert done.returncode == 0 and MARKUP in done.stdout, done.stderr


def test_the_status_shows_reasons_and_names_that_look_like_markup(printed: Callable[..., str]) -> None:
    services = [{"name": f"service {MARKUP}", "declared": {"n": {}}, "instances": [{**INSTANCE, "reason": f"instance {MARKUP}"}]}]
    message = {"failed_at": 1.0, "kind": "ActionReceived", "action": f"action {MARKUP}", "message": "", "error": f"error {MARKUP}"}
    nodes = [{**NODE, "name": f"node {MARKUP}", "reason": f"reason {MARKUP}"}]
    held = {f"held {MARKUP}": {"waiting": 4, "ours": 6, "ended": 21, "held_s": 4.0, "next_in_s": 3.0}}
    scheduler = {"policy": "elastic", "epoch": 1, "waiting": 4, "running": 0, "decisions": 1, "decision_us_p99": 1.0, "held_back": held}
    failed = {f"cause {MARKUP}": 1}
    state = {**STATE, "scheduler": scheduler, "nodes": nodes, "services": services, "set_aside": [message], "infra_failed": failed}
    shown = printed(300, show_state, state, f"problem {MARKUP}")
    for what in ("node", "reason", "service", "instance", "action", "error", "cause", "problem", "held"):
        assert f"{what} {MARKUP}" in shown, shown


def test_a_shard_whose_scheduler_is_silent_is_named_beside_the_others(printed: Callable[..., str]) -> None:
    scheduler = {"policy": "elastic", "epoch": 1, "waiting": 4, "running": 0, "decisions": 1, "decision_us_p99": 1.0, "shard": 1}
    for shown_ago_s, is_named in ((0.5, False), (60.0, True)):
        shown = printed(160, show_state, {**STATE, "scheduler": {**scheduler, "shown_ago_s": shown_ago_s}})
        assert "4 waiting" in shown and ("the scheduler of shard 1 does not show itself" in shown) is is_named


def test_environments_keep_their_ids_at_80_columns(printed: Callable[..., str]) -> None:
    one = {
        "id": "env-0123456789abcdef", "job": "a-job-with-a-long-name", "trajectory": "trajectory-000123", "owner": "host-17:14828",
        "node": "cpu-0", "state": "open", "age_s": 1234.0, "lease_left_s": 3600.0, "running": ["a"], "orphan": "silent for 90 s",
    }  # fmt: skip
    shown = printed(80, show_environments, [one])
    assert "env-0123456789abcdef" in shown and "1234" in shown and "3600" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert printed(80, show_environments, []) == "no environments\n"


def overview_of(many: int) -> dict[str, Any]:
    """Return an overview with so many rows in each table."""
    ended = {"ours": 0, "ended": 1234, "running": 110, "waiting": 0, "share": 0.25, "mean_act": 12.3, "held_back": None}
    node = {
        "state": "up", "draining": False, "ours": 0, "ended": 0, "causes": {}, "beat_ago_s": 0.1, "rests_s": None,
        "isolation": "bubblewrap", "cores": 110, "cores_granted": 110, "cells": 0, "cells_granted": 0, "running": 110, "environments": 110,
    }  # fmt: skip
    amounts = {"granted": 1234, "total": 1234, "idle": 0, "used": 1200.0}
    quota = {"running": 110, "concurrency": 110, "waiting": 110, "throttle": "open"}
    return {
        "at": 0.0, "scheduler": {"policy": "elastic", "epoch": 1}, "waiting": 110, "running": 110, "oldest_wait_s": 1.0,
        "set_aside": [], "silent": [],
        "cores": amounts, "cells": amounts,
        "queue": [{"job": f"job-{at}", "kind": "cpu.exec", "waiting": 110, "oldest_s": 3.0} for at in range(many)],
        "jobs": [{"name": f"job-{at}", **ended} for at in range(many)],
        "nodes": [{"name": f"node-{at}", **node} for at in range(many)],
        "quotas": [{"name": f"quota-{at}", **quota} for at in range(many)],
        "services": [{"name": f"service-{at}", "states": {"resident": 1}, "running": 110, "waiting": 110} for at in range(many)],
    }  # fmt: skip


def test_the_first_rows_of_each_table_fit_a_terminal_of_24_lines() -> None:
    console = Console(width=80, height=24)
    with console.capture() as capture:
        console.print(fitting(console, overview_of(20)))
    shown = capture.get()
    assert len(shown.splitlines()) <= 24, shown
    for first in ("job-0", "node-0", "quota-0", "service-0", "what waits, 2 of 20"):
        assert first in shown, shown


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_figures_are_whole_on_a_narrow_terminal_and_what_waits_is_not_bad(columns: int, printed: Callable[..., str]) -> None:
    stats = {
        "by_status": {"succeeded": 31_413, "failed": 271, "waiting": 2}, "by_fault": {"program": 271},
        "act": {"mean": 0.125, "p95": 12.345}, "mean_queue_s": 1234.56, "mean_background_s": 7.125, "mean_overhead_s": 0.001,
        "mean_execution_s": 99.5, "core_s_used": 5678.5, "core_s_reserved": 2.0,
    }  # fmt: skip
    node = {**NODE, "description": {"kinds": ["cpu"], "cores": 110, "cells": 223}, "running": 337, "environments": 441}
    report = {"job": "j", "total": stats, "by_kind": {"gpu.logprobs": stats}, "by_job": {}, "pod_core_s": 0.0}
    shown = printed(columns, show_report, report) + printed(columns, show_state, {**STATE, "nodes": [node]})
    shown += printed(columns, lambda as_json: keep_showing(lambda: (overview_of(2), ""), 1.0, threading.Event()))
    words = set(re.findall(r"[\w.]+", shown))
    assert {"31686", "271", "0.125", "12.35", "1234.6", "99.50", "5678.5", "110", "223", "337", "441"} <= words, shown
    assert max(map(len, shown.partition("bad: ended")[0].splitlines())) <= columns
    if columns == 80:
        row = next(line for line in shown.splitlines() if line.startswith("all"))
        assert row.split() == ["all", "31686", "271", "0", "271", "0.125", "12.35", "1234.6", "7.125", "0.001", "99.50", "5678.5"]


def test_each_instance_has_a_line_with_what_it_holds(printed: Callable[..., str]) -> None:
    lost = {**INSTANCE, "node": "m", "state": "lost", "reason": "node m is lost; it was host", "memory_mb": 0.0, "host_mb": 0.0}
    services = [
        {"name": "judge", "declared": {"n": {}}, "instances": [INSTANCE]},
        {"name": "idle", "declared": {"n": {}}, "instances": []},
        {"name": "old", "declared": {}, "instances": [lost]},
    ]
    assert rows(printed(160, show_state, {**STATE, "services": services}))[1:] == [
        ["judge", "n", "0, 1", "resident", "1200", "600", "3", "1/2/3/4/5", ""],
        ["idle", "n", "", "absent", "", "", "", "", ""],
        ["old (declared nowhere)", "m", "0, 1", "lost", "0", "0", "3", "1/2/3/4/5", "node m is lost; it was host"],
    ]


def test_without_reasons_both_tables_fit_into_80_columns(printed: Callable[..., str]) -> None:
    described = {"kinds": ["cpu"], "cores": 64, "cells": 0, "labels": ["isolation:bubblewrap", "memory:not-enforced"]}
    node = {**NODE, "name": "cpu-0", "description": described}
    service = {"name": "teacher-0", "declared": {"gpu-0": {}}, "instances": [{**INSTANCE, "node": "gpu-0", "cells": [0]}]}
    shown = printed(80, show_state, {**STATE, "nodes": [node], "services": [service]})
    assert "reason" not in shown
    for word in ("cpu-0", "isolation", "bubblewrap", "enforced", "envs", "teacher-0", "resident", "1/2/3/4/5"):
        assert f" {word} " in shown, shown


def test_each_node_says_its_state_how_commands_are_set_apart_and_whether_memory_is_bounded(printed: Callable[..., str]) -> None:
    described = {"kinds": ["cpu"], "labels": ["node:c", "isolation:none", "background:affinity", "memory:not-enforced"]}
    nodes = [NODE, {**NODE, "name": "c", "description": described}, {**NODE, "name": "d", "draining": True}]
    lines = rows(printed(160, show_state, {**STATE, "nodes": [*nodes, {**nodes[2], "state": "lost"}]}))
    assert [line[:2] for line in lines[2:]] == [["d", "draining"], ["d", "lost, draining"]]
    assert [line[:3] + line[5:7] for line in lines[:2]] == [["n", "up", "gpu", "", ""], ["c", "up", "cpu", "none", "not enforced"]]
    of_shards = rows(printed(160, show_state, {**STATE, "nodes": [NODE, {**NODE, "shard": 1}]}))
    assert [line[9:] for line in of_shards] == [["0"], ["1"]]
