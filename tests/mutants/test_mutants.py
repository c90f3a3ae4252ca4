"""What `make mutants` says of a small tree: of defects that a test finds, that none finds, and that are out of date."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.running import read, try_all

PRODUCT = '''
def most(values):
    """Return the largest value, 0 for none."""
    return max(values, default=0)
'''
TESTS = """
from product import most


def test_the_largest():
    assert most([1, 3, 2]) == 3


def test_its_type():
    assert isinstance(most([1]), int)
"""
ROW = """
[[mutant]]
name = "{name}"
file = "product.py"
old = "{old}"
new = "{new}"
why = "It matters."
test = "test_product.py::{test}"
layer = 1
"""
MAX, MIN = "return max(values", "return min(values"
ROWS = {
    "killed": (MAX, MIN, "test_the_largest"),
    "survived": (MAX, MIN, "test_its_type"),
    "out of date": ("return sorted(values", MIN, "test_its_type"),
    "broken": (MAX, "return max((values", "test_its_type"),
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a tree under git, with a file that git does not track. Its tests need no plugins, which take long to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "product.py").write_text(PRODUCT)
    (tmp_path / "test_product.py").write_text(TESTS)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
    (tmp_path / "list.toml").write_text(
        "".join(ROW.format(name=name, old=old, new=new, test=test) for name, (old, new, test) in ROWS.items())
    )
    return tmp_path


def test_each_defect_is_told_apart_and_the_tree_stays_as_it_is(tree: Path) -> None:
    told: list[str] = []
    outcomes = try_all(read(tree), tree, 2, lambda outcome: told.append(outcome.mutant.name))
    assert {outcome.mutant.name: outcome.result for outcome in outcomes} == {name: name for name in ROWS}
    assert sorted(told) == sorted(ROWS)
    assert next(outcome.problem for outcome in outcomes if outcome.result == "killed") == "assert 1 == 3"
    assert (tree / "product.py").read_text() == PRODUCT


def test_names_pick_some(tree: Path) -> None:
    assert [mutant.name for mutant in read(tree, ["s*", "killed"])] == ["killed", "survived"]


def test_tests_that_fail_without_a_defect_say_nothing_of_one(tree: Path) -> None:
    (tree / "product.py").write_text(PRODUCT.replace(MAX, MIN))
    with pytest.raises(RuntimeError, match="test_the_largest"):
        try_all(read(tree, ["killed"]), tree, 1, lambda outcome: None)


def test_the_text_of_each_defect_of_this_tree_stands_once_in_its_file() -> None:
    root = Path(__file__).parents[2]
    assert [mutant.name for mutant in read(Path(__file__).parent) if (root / mutant.file).read_text().count(mutant.old) != 1] == []
