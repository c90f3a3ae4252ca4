"""The table of services in `tangram status`."""

from __future__ import annotations

import pytest

from app.cli.output import show_state

NODE = {
    "name": "n", "state": "up", "draining": False, "description": {"kinds": ["gpu"]}, "running": 0, "environments": 0, "reason": "",
}  # fmt: skip
STATE = {"scheduler": None, "nodes": [NODE], "services": [], "actions": {}, "oldest_wait_s": 0.0, "set_aside": [], "infra_failed": {}}
INSTANCE = {
    "node": "n", "cells": [0, 1], "state": "resident", "reason": "", "memory_mb": 1200.4, "host_mb": 600.0, "running": 3,
    "starts": 1, "restores": 2, "evictions": 3, "leaks": 4, "wrong_answers": 5, "changed_at": 1.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a terminal wide enough for every column."""
    monkeypatch.setenv("COLUMNS", "160")


def test_each_instance_has_a_line_with_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    lost = {**INSTANCE, "node": "m", "state": "lost", "reason": "node m is lost; it was host", "memory_mb": 0.0, "host_mb": 0.0}
    services = [
        {"name": "judge", "declared": {"n": {}}, "instances": [INSTANCE]},
        {"name": "idle", "declared": {"n": {}}, "instances": []},
        {"name": "old", "declared": {}, "instances": [lost]},
    ]
    show_state({**STATE, "services": services}, as_json=False)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert lines[1:] == [
        ["judge", "n", "0, 1", "resident", "1200", "600", "3", "1/2/3/4/5", ""],
        ["idle", "n", "", "absent", "", "", "", "", ""],
        ["old (declared nowhere)", "m", "0, 1", "lost", "0", "0", "3", "1/2/3/4/5", "node m is lost; it was host"],
    ]


def test_without_reasons_both_tables_fit_into_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    described = {"kinds": ["cpu"], "cores": 64, "cells": 0, "labels": ["isolation:bubblewrap", "memory:not-enforced"]}
    node = {**NODE, "name": "cpu-0", "description": described}
    service = {"name": "teacher-0", "declared": {"gpu-0": {}}, "instances": [{**INSTANCE, "node": "gpu-0", "cells": [0]}]}
    show_state({**STATE, "nodes": [node], "services": [service]}, as_json=False)
    shown = capsys.readouterr().out
    assert "reason" not in shown
    for word in ("cpu-0", "isolation", "bubblewrap", "enforced", "envs", "teacher-0", "resident", "1/2/3/4/5"):
        assert f" {word} " in shown, shown


def test_each_node_says_how_commands_are_set_apart_and_whether_memory_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    described = {"kinds": ["cpu"], "labels": ["node:c", "isolation:none", "background:affinity", "memory:not-enforced"]}
    show_state({**STATE, "nodes": [NODE, {**NODE, "name": "c", "description": described}]}, as_json=False)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [line[:3] + line[5:7] for line in lines] == [["n", "up", "gpu", "", ""], ["c", "up", "cpu", "none", "not enforced"]]
