"""The matrix itself: its page, its tests, its versions, and what it makes of a run."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

pytest.importorskip("e2b", reason="the extra `clients` is not installed")
pytest.importorskip("swerex", reason="the extra `clients` is not installed")

from tests.clients import running
from tests.clients.environments import ENVIRONMENTS, ROOT, Environment
from tests.clients.page import page, summary
from tests.clients.rows import Row, nodes_of, rows
from tests.clients.running import Shown

ROW = Row(client="c", version="1", method="m", outcome="works", tests=("tests/a.py::test_one", "tests/a.py::test_two[x]"))


def test_the_page_has_the_rows_of_the_code() -> None:
    assert (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8") == page(rows())


def test_every_row_names_tests_that_exist() -> None:
    for test in nodes_of(rows()):
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_no_method_of_a_client_has_two_rows() -> None:
    found = [(row.client, row.method) for row in rows()]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("client", ["e2b", "sandbox-fusion", "swe-rex"])
def test_versions_are_those_that_are_installed(client: str) -> None:
    assert {row.version for row in rows() if row.client == client} == {importlib.metadata.version(client)}


def test_every_environment_has_rows_and_is_installed_from_its_file() -> None:
    assert {row.environment for row in rows()} == set(ENVIRONMENTS)
    for environment in ENVIRONMENTS.values():
        assert (ROOT / environment.constraints).is_file()


def test_a_row_is_shown_where_all_its_tests_passed() -> None:
    both = {"tests/a.py::test_one[a]": ("shown", ""), "tests/a.py::test_one[b]": ("shown", ""), "tests/a.py::test_two[x]": ("shown", "")}
    assert running._judged(ROW, both) == Shown(ROW, "shown")
    failed = running._judged(ROW, {**both, "tests/a.py::test_one[b]": ("failed", "assert 1 == 2")})
    assert (failed.state, failed.why) == ("failed", "tests/a.py::test_one: assert 1 == 2")
    absent = running._judged(ROW, {"tests/a.py::test_one": ("shown", "")})
    assert (absent.state, absent.why) == ("failed", "tests/a.py::test_two[x] did not run")


def test_what_pytest_wrote_is_read_by_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.a" name="test_one"/>
        <testcase classname="tests.a" name="test_two[x]"><failure message="assert 1&#10;more"/></testcase>
        <testcase classname="tests.a" name="test_three"><skipped message="no engine"/></testcase>
        <testcase classname="tests.a" name="test_one"><error message="torn"/></testcase>
        </testsuite></testsuites>"""
    )
    assert running._ended(report) == {
        "tests/a.py::test_one": ("failed", "torn"),
        "tests/a.py::test_two[x]": ("failed", "assert 1"),
        "tests/a.py::test_three": ("skipped", "no engine"),
    }


@pytest.mark.parametrize(("ci", "state"), [("", "skipped"), ("true", "failed")])
def test_an_environment_that_was_not_built_skips_its_rows_and_fails_them_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, state: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setitem(ENVIRONMENTS, "project", Environment("agents", "none", ROOT / ".venv-clients" / "nowhere" / "bin" / "python"))
    (shown,) = running.run([ROW], ["project"])
    assert shown == Shown(ROW, state, ".venv-clients/nowhere was not built: make clients CLIENTS=agents")
    assert summary([shown]).endswith(f"rows: 0 passed, {int(state == 'failed')} failed, {int(state == 'skipped')} skipped")
