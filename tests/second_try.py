"""Tests of real components, once more where they failed: alone, after everything else has ended.

    python -m tests.second_try ARGUMENTS OF PYTEST [--then ARGUMENTS OF PYTEST]...

runs pytest once for each list of arguments, one after the other. The tests marked `real` that failed then run again, in one process with
nothing beside it. Both results are printed, and the last line counts the second tries. A test that fails twice has failed. So has one
without the mark: only tests of real components depend on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest

THEN = "--then"
WRITE_TO = "--write-outcomes-to"


class Outcome(NamedTuple):
    """How a test ended, and whether it is of a real component."""

    outcome: str
    real: bool


class Outcomes:
    """A plugin of pytest that writes down how each test ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Outcome] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take note of a part of a test. One that failed outweighs the others, and the call outweighs set-up and teardown."""
        known = self._found.get(report.nodeid)
        if known is None or report.failed or (report.when == "call" and known.outcome != "failed"):
            self._found[report.nodeid] = Outcome(report.outcome, "real" in report.keywords)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._found[report.nodeid] = Outcome("failed", False)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._found))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(WRITE_TO, type=Path)


def pytest_configure(config: pytest.Config) -> None:
    """Write down outcomes in the process that hears of all of them, which is no worker of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config.getoption(WRITE_TO)))


def run(*arguments: str) -> tuple[int, dict[str, Outcome]]:
    """Run pytest; return its exit code and how each test ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcomes.json"
        done = subprocess.run([sys.executable, "-m", "pytest", "-p", "tests.second_try", f"{WRITE_TO}={path}", *arguments], check=False)
        found = json.loads(path.read_text()) if path.exists() else {}
    return done.returncode, {name: Outcome(*outcome) for name, outcome in found.items()}


def main(words: list[str]) -> int:
    """Run all lists of arguments, then the second tries; return 1 where a test has failed for good or pytest itself has."""
    failed, again = False, []
    for arguments in (list(part) for between, part in groupby(words, THEN.__eq__) if not between):
        code, found = run(*arguments)
        lost = [name for name, (outcome, _) in found.items() if outcome == "failed"]
        tries = [name for name in lost if found[name].real]
        failed |= code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or len(tries) < len(lost) or bool(code) > bool(lost)
        again += tries
    if not again:
        print("0 tests of real components needed a second try")
        return int(failed)
    print(f"\nsecond try of {len(again)} tests, alone", flush=True)
    _, found = run(*again)
    lost = [name for name in again if found.get(name, Outcome("not run", True)).outcome != "passed"]
    for name in again:
        print(f"{name}: failed, then {found[name].outcome if name in found else 'not run'}")
    print(f"{len(again)} tests of real components needed a second try: {', '.join(again)}")
    return int(failed or bool(lost))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
