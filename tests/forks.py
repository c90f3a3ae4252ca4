"""Runs tests in forks of the process that has collected them: `pytest -p tests.forks --forks 3`.

Each process of xdist imports and collects all tests by itself, which takes as long as many of them do. A fork has them already. It runs
whole lots of tests, in their order, and takes the next lot as it comes to the last test of one.
"""

from __future__ import annotations

import atexit
import os
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest

ONCE = {"torch": r"^from tests\.(engines|lazily|vllm)\b", "template": r"^from tests\.cli\.(support|template)\b"}
"""What takes seconds to start, and which line a file has that starts it: torch, and the process that commands are forked from."""

ALONE = {"test_virtual_seeds.py"}
"""Files whose tests go to whichever fork is free, each by itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run tests in N forks of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Share the lots out, and show what the forks report. Leave it to pytest where nothing is to be run."""
    count = session.config.getoption("forks")
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    lots = lots_of(session.items)
    todo, filling = os.pipe()
    os.write(filling, b"".join(number.to_bytes(2) for number in range(len(lots))))
    os.close(filling)
    forks = [begin(session, lots, todo) for _ in range(count)]
    begun = set[str]()
    try:
        listen(session, forks, todo, begun)
    finally:
        drain(todo)
        for fork in forks:  # each fork also holds the ends of those before it, so all are closed before one is waited for
            fork.hears.close()
        for fork in forks:
            os.waitpid(fork.pid, 0)
        os.close(todo)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    for item in session.items:
        if item.nodeid not in begun:
            session.config.hook.pytest_runtest_logreport(report=broken(item.nodeid))
    return True


def lots_of(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """Return what one fork runs in a row: mostly the tests of a file."""
    lots: dict[str, list[pytest.Item]] = {}
    for item in items:
        lots.setdefault(_lot_of(item), []).append(item)
    return list(lots.values())


def _lot_of(item: pytest.Item) -> str:
    """Return what names a test's lot. Files that start the same of `ONCE` are one lot, and real ones of a folder that share a stack or
    engines."""
    file = item.path
    if item.get_closest_marker("real"):
        shares = starts_a_stack(file.with_name("conftest.py")) and not starts_a_stack(file)
        return str(file.parent if shares else file)
    if file.name in ALONE:
        return item.nodeid
    return next((what for what, pattern in ONCE.items() if says(file, pattern)), str(file))


def starts_a_stack(file: Path) -> bool:
    """Return whether a file has what starts a stack, or engines."""
    return says(file, r"^from tests\..* import .*\b(running|started|serving|shelf)\b")


@cache
def says(file: Path, pattern: str) -> bool:
    """Return whether a line of a file has a pattern."""
    return file.exists() and bool(re.search(pattern, file.read_text(), re.MULTILINE))


@dataclass
class Fork:
    """A process that runs tests, and the test that it has begun last."""

    pid: int
    hears: Connection
    test: str = ""


def begin(session: pytest.Session, lots: Sequence[list[pytest.Item]], todo: int) -> Fork:
    hears, tells = Pipe(duplex=False)
    if pid := os.fork():
        tells.close()
        return Fork(pid, hears)
    hears.close()
    status, stderr = 1, os.dup(2)
    try:
        atexit._clear()
        run(session, lots, todo, tells.send)
        atexit._run_exitfuncs()
        status = 0
    except BaseException:
        os.write(stderr, traceback.format_exc().encode())
    finally:
        os._exit(status)


def run(session: pytest.Session, lots: Sequence[list[pytest.Item]], todo: int, say: Callable[[tuple[str, Any]], None]) -> None:
    config = session.config
    config.workerinput = {}  # type: ignore[attr-defined]  # so that plugins know that others show and write what there is
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.pluginmanager.register(Reporter(config, say))

    def following() -> list[pytest.Item]:
        word = os.read(todo, 2)
        return lots[int.from_bytes(word)] if word else []

    try:
        lot = following()
        while lot:
            for item, after in pairwise(lot):
                config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            last, lot = lot[-1], following()
            config.hook.pytest_runtest_protocol(item=last, nextitem=lot[0] if lot else None)
    finally:
        config.hook.pytest_sessionfinish(session=session, exitstatus=0)


class Reporter:
    """Tells the process that shows results what happens in a fork."""

    def __init__(self, config: pytest.Config, say: Callable[[tuple[str, Any]], None]) -> None:
        self._config, self._say = config, say

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(("begins", nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._say(("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._say(("finished", (nodeid, location)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any) -> None:
        said = (str(warning_message.message), warning_message.category.__name__, warning_message.filename, warning_message.lineno)
        self._say(("warning", (said, when, nodeid, location)))


def listen(session: pytest.Session, forks: list[Fork], todo: int, begun: set[str]) -> None:
    """Show what forks report until all have ended, and note which tests they begin. Once tests are to stop, no lot is begun any more."""
    hook, running = session.config.hook, {fork.hears: fork for fork in forks}
    while running:
        for hears in wait(list(running)):
            assert isinstance(hears, Connection)
            try:
                what, told = hears.recv()
            except (EOFError, OSError):  # also in the middle of a message
                fork = running.pop(hears)
                forks.remove(fork)
                if os.waitpid(fork.pid, 0)[1]:
                    hook.pytest_runtest_logreport(report=broken(fork.test))
                continue
            if what == "begins":
                running[hears].test = told
                begun.add(told)
            elif what == "report":
                hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=session.config, data=told))
            elif what == "finished":
                hook.pytest_runtest_logfinish(nodeid=told[0], location=told[1])
            else:
                (text, kind, file, line), *where = told
                message = warnings.WarningMessage(f"{kind}: {text}", Warning, file, line)
                known = dict(zip(("when", "nodeid", "location"), where, strict=True))
                hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **known})
        if session.shouldfail or session.shouldstop:
            drain(todo)


def drain(todo: int) -> None:
    """Leave no lot for the forks to begin."""
    while os.read(todo, 1 << 16):
        pass


def broken(nodeid: str) -> pytest.TestReport:
    """Return the report of a fork that ended by itself: at this test, after it, or before it."""
    return pytest.TestReport(nodeid, (nodeid, None, nodeid), {}, "failed", "the process that was to run this ended by itself", "call")
