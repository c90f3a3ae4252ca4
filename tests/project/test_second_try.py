"""A test of a real component has a second try, alone; nothing else has one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest_plugins = "pytester"

ROOT = Path(__file__).resolve().parents[2]
FAILS_ONCE = """
    from pathlib import Path

    def test_that_fails_once():
        mark = Path(__file__).with_suffix(".mark")
        first = not mark.exists()
        mark.touch()
        assert not first, "the first try"
"""
REAL = """
    import pytest
    pytestmark = pytest.mark.real
"""
STACK = """
    @pytest.fixture
    def stack():
        attempt()
        yield

    def test_with_a_stack(stack):
        pass
"""


@pytest.fixture
def files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


def run(files: pytest.Pytester, *words: str) -> pytest.RunResult:
    return files.run(sys.executable, "-m", "tests.second_try", *words)


def test_a_real_component_that_fails_once_is_tried_again_when_all_others_have_ended(files: pytest.Pytester) -> None:
    # Given a test of a real component that fails once, one whose stack starts at the second try, and others that run after them
    attempt = FAILS_ONCE.replace("test_that_fails_once", "attempt")
    files.makepyfile(test_once=REAL + FAILS_ONCE, test_stack=REAL + attempt + STACK, test_later="def test_that_passes():\n    pass\n")
    # When the first ones run beside each other
    beside = ("-p", "tests.forks", "--forks", "2", "test_once.py", "test_stack.py")
    done = run(files, *beside, "--then", "test_later.py")
    # Then both failures are shown, the others have run before the second tries, and the last line names the tests
    assert done.ret == 0
    shown = ["*AssertionError: the first try*", "*AssertionError: the first try*", "*1 failed*1 error*", "*1 passed*"]
    done.stdout.fnmatch_lines([*shown, "second try of 2 tests, alone", "*2 passed*"])
    names = ["test_once.py::test_that_fails_once", "test_stack.py::test_with_a_stack"]
    *results, last = done.outlines[-3:]
    assert sorted(results) == [f"{name}: failed, then passed" for name in names]
    assert last.startswith("2 tests of real components needed a second try: ") and all(name in last for name in names)


def test_one_that_fails_twice_has_failed_and_nothing_else_is_tried_again(files: pytest.Pytester) -> None:
    # Given a test of a real component that fails each time, one without the mark that fails once, and a file that cannot be read
    files.makepyfile(
        test_twice=REAL + "\n    def test_that_fails():\n        assert False, 'each try'\n",
        test_unmarked=FAILS_ONCE,
        test_broken="import nothing_of_that_name\n",
    )
    done = run(files, "test_twice.py", "test_unmarked.py", "test_broken.py", "--continue-on-collection-errors")
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*AssertionError: each try*", "second try of 1 tests, alone", "*AssertionError: each try*"])
    assert done.outlines[-2] == "test_twice.py::test_that_fails: failed, then failed"
