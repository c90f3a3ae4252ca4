"""Whatever sets commands apart from the host, sessions, kills, grants, usage and files are the same."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import below_this, make
from .support import RUN, open_one, printed, processes_with, run, until

HERE = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(HERE) < 2, reason="moving a process between cores needs two of them")


def test_programs_on_the_path_run(either: ProcessEnvironment) -> None:
    # Given the worker's PATH; when its python and make are used; then they work, standard library and all
    either.write_file("Makefile", b"all:\n\t@python3 -c 'import json, ssl, sqlite3; print(json.dumps([1]))'\n")
    assert printed(either, "make -s") == "[1]\n"


def test_a_virtual_environment_on_the_path_runs(tmp_path: Path) -> None:
    # Given a PATH with the folder of this interpreter
    make(tmp_path / "box", "bubblewrap").close()
    box = ProcessSandbox(tmp_path / "box", isolation="bubblewrap", search_path=f"{Path(sys.executable).parent}:/usr/bin:/bin")
    # When that is asked for its packages; then they are there
    assert printed(open_one(box), "python -c 'import pytest, sys; print(sys.prefix)'") == f"{sys.prefix}\n"
    box.close()


def test_state_that_no_shell_can_start_with_is_forgotten(either: ProcessEnvironment) -> None:
    # Given a function that is exported, and state that ends every shell that reads it
    printed(either, ":")
    states: list[Path] = []
    assert until(lambda: bool(states.extend(either.work_folder.parents[2].glob("control/*/state")) or states))
    (state,) = states
    assert run(either, "kill -9 $$").exit_code == 137
    state.write_text("exit 7\n")
    # When a command runs; then a shell without that state carries it out, and keeps state again
    assert printed(either, "export Y=kept; echo alive") == "alive\n"
    assert run(either, "exit 3").exit_code == 3
    assert printed(either, "echo $Y") == "kept\n"


def test_a_session_that_ends_its_own_init_starts_again(inside: ProcessEnvironment) -> None:
    # Given a session with state; when a command kills all that it can reach
    printed(inside, "export X=1")
    assert run(inside, "kill -9 -1; sleep 5").exit_code == 137
    # Then the next one runs
    assert printed(inside, "echo $X") == "1\n"
    assert run(inside, "kill -9 2; sleep 5").exit_code == 137
    assert printed(inside, "echo $X") == "1\n"


def test_a_closed_environment_leaves_no_process_of_the_host_behind(either: ProcessEnvironment) -> None:
    # Given the processes below this one, among them those of a session
    before = {process.pid for process in below_this()}
    printed(either, f"setsid sleep 317.828125{RUN} >/dev/null 2>&1 &")
    assert {process.pid for process in below_this()} - before
    # When the environment is closed; then there are no more than before
    either.close()
    assert until(lambda: {process.pid for process in below_this()} - before <= fork_servers())


def fork_servers() -> set[int]:
    found = set()
    for pid in processes_with("workers.cpu.process.fork_server"):
        with contextlib.suppress(OSError):
            process = tree.read_process(pid)
            if process is not None and process.parent == os.getpid():  # it may have ended since
                found.add(pid)
    return found
