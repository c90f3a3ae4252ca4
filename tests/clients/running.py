"""Runs the tests of rows, each in the interpreter of its client, and says which rows they have shown."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.clients.environments import ENVIRONMENTS, ROOT, Environment
from tests.clients.rows import Row, tests_of

LIMIT_S = 900
"""How long the tests of one environment may take."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Whether the tests of a row passed: `shown`, `failed` or `skipped`, and why not."""

    row: Row
    state: str
    why: str = ""


def run(rows: Iterable[Row], environments: Iterable[str]) -> list[Shown]:
    """Run the rows of some environments.

    An environment that was not built skips its rows; with CI set they fail.
    """
    found: list[Shown] = []
    chosen = list(rows)
    for name in environments:
        environment = ENVIRONMENTS[name]
        own = [row for row in chosen if row.environment == name]
        if not own:
            continue
        if environment.missing:
            state = "failed" if os.environ.get("CI") else "skipped"
            found += [Shown(row, state, environment.missing) for row in own]
            continue
        ended = _pytest(environment, tests_of(own))
        found += [_judged(row, ended) for row in own]
    return found


def _pytest(environment: Environment, nodes: list[str]) -> dict[str, tuple[str, str]]:
    """Run tests in an interpreter; return by test how it ended, and why. What pytest prints goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(environment.python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *nodes]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        print(f"{environment.name}: {len(nodes)} tests …", file=sys.stderr, flush=True)
        try:
            subprocess.run(command, cwd=ROOT, env=variables, stdout=sys.stderr, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{environment.name}: its tests took longer than {LIMIT_S} s", file=sys.stderr)
        return _ended(report) if report.exists() else {}


def _ended(report: Path) -> dict[str, tuple[str, str]]:
    ended: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        bad = [one for kind in ("failure", "error", "skipped") for one in case.iter(kind)]
        state = "shown" if not bad else "skipped" if bad[0].tag == "skipped" else "failed"
        why = (bad[0].get("message") or "").partition("\n")[0] if bad else ""
        node = f"{file}::{case.get('name')}"
        # A test that fails when it is torn down is there twice.
        if ended.get(node, ("shown", ""))[0] == "shown":
            ended[node] = (state, why)
    return ended


def _judged(row: Row, ended: dict[str, tuple[str, str]]) -> Shown:
    """Return what the tests say of a row: a test without parameters in its name stands for all of its own."""
    for test in row.tests:
        ways = [how for node, how in ended.items() if node == test or node.startswith(f"{test}[")]
        if not ways:
            return Shown(row, "failed", f"{test} did not run")
        for state, why in ways:
            if state != "shown":
                return Shown(row, state, f"{test}: {why}")
    return Shown(row, "shown")
