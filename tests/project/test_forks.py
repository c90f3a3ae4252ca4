"""Tests that run in forks: each result is shown once, and a fork that ends by itself is a failure of all that it was to run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest_plugins = "pytester"

FILES = {
    "test_a_passes": "import pytest\n@pytest.mark.parametrize('number', range(3))\ndef test_that_passes(number):\n    pass\n",
    "test_b_fails": "def test_that_fails():\n    print('before')\n    assert 1 == 2\n",
    "test_c_dies": "import os\ndef test_that_dies():\n    os._exit(3)\n",
    "test_d_interrupts": """
        import os, pathlib, time
        def test_that_is_reported():
            pass
        def test_that_interrupts():
            while not pathlib.Path("listens").exists():
                time.sleep(0.01)
            os.kill(os.getppid(), 2)
            print("much" * (1 << 20))
    """,
    "test_e_reports_half": """
        import multiprocessing.connection, os
        def test_that_dies_as_it_reports():
            send = lambda self, message: (os.write(self.fileno(), message[: len(message) // 2]), os._exit(3))
            multiprocessing.connection.Connection._send = send
    """,
}
# An interrupt that comes while the process that shows results still forks would be dropped, as in any callback of a fork.
CONFTEST = """
    import os, pathlib
    SHOWS = os.getpid()
    def pytest_runtest_logreport():
        if os.getpid() == SHOWS:
            pathlib.Path("listens").touch()
"""


def test_what_forks_report_is_shown_once(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(**FILES)
    pytester.makeconftest(CONFTEST)
    words = [sys.executable, "-m", "pytest", "-p", "tests.forks", "--forks"]
    # Given files whose tests pass, fail and end their process; when two forks run them; then all is told as one process tells it
    done = pytester.run(*words, "2", "test_a_passes.py", "test_b_fails.py", "test_c_dies.py")
    done.assert_outcomes(passed=3, failed=2)
    done.stdout.fnmatch_lines(["*assert 1 == 2*", "before"])
    done.stdout.fnmatch_lines(["the process that was to run this ended by itself"])
    assert done.ret == 1
    # When a fork ends that was to run others, too; then these have failed
    for dies in ("test_c_dies.py", "test_e_reports_half.py"):
        pytester.run(*words, "1", dies, "test_a_passes.py").assert_outcomes(failed=4)
    # When the first failure is to be the last; then little is begun after it
    pytester.run(*words, "1", "-x", "test_b_fails.py", "test_a_passes.py").assert_outcomes(failed=1, passed=3)
    # When the process that shows results is interrupted, and a fork still has much to report; then both end
    Path("listens").unlink()
    assert pytester.run(*words, "2", "test_d_interrupts.py", "test_a_passes.py", timeout=60).ret == pytest.ExitCode.INTERRUPTED
