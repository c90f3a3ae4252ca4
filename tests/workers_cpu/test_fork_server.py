"""Nothing is left of a session when its connection ends, however its supervisor or the fork server ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.freezing import freeze
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import make
from .support import RUN, open_one, printed, processes_with, run, until

# While the children of each process are read, the one that was met last dies and is reaped, its child having been handed on.
HANDED_ON = """
import os, signal, subprocess
from workers.cpu.process import members, serving, tree
serving.prctl(serving.PR_SET_CHILD_SUBREAPER, 1)
parent = subprocess.Popen(["sh", "-c", "sleep 313.40625 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
child = int(parent.stdout.readline())
children = tree.children

def slow(pid, thread_count=0):
    if pid == parent.pid:
        parent.kill()
        parent.wait()
    return children(pid, thread_count)

tree.children = slow
found, is_all = tree.settled(os.getpid())
print([process.pid for process in found] == [child], is_all)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
print(tree.settled(os.getpid()), members.has_children())
"""
# A process that the first walks do not find, as if it forked and ended faster than one goes.
RUNAWAY = """
import os
from workers.cpu.process import members, serving, tree
serving.prctl(serving.PR_SET_CHILD_SUBREAPER, 1)
walks = []

def blind(*_):
    walks.append(1)
    return ([], True) if len(walks) < 50 else walk(*_)

walk, tree.settled = tree.settled, blind
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "313.421875"])
wakeup = serving.Wakeup()

def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

print(members.kill(members.Members(os.getpid()), set(), 0.0, wakeup, reap), members.has_children())
"""


@pytest.fixture
def sandbox_alone(tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a sandbox whose sessions print the host's ids."""
    box = make(tmp_path / "box", "none")
    yield box
    box.close()


def fork_server_of(box: ProcessSandbox) -> int:
    """Return the process that forks supervisors."""
    process = box._fork_client._process
    assert process is not None
    return process.pid


def test_the_connection_to_a_killed_supervisor_ends_once_nothing_is_left(sandbox_alone: ProcessSandbox) -> None:
    # Given a session with a process out of reach of its shell, and a fork server that does nothing for now
    env = open_one(sandbox_alone)
    supervisor = int(printed(env, f"setsid sleep 313.375{RUN} >/dev/null 2>&1 & echo $PPID"))
    assert until(lambda: len(processes_with(f"sleep\x00313.375{RUN}")) == 1)
    backend = env._sessions["main"]._backend
    assert backend is not None
    freeze(fork_server_of(sandbox_alone))
    # When the supervisor is killed; then the connection stands as long as that process lives
    os.kill(supervisor, signal.SIGKILL)
    assert not backend.has_ended(0.3)
    assert processes_with(f"sleep\x00313.375{RUN}")
    # And ends with it
    os.kill(fork_server_of(sandbox_alone), signal.SIGCONT)
    assert backend.has_ended(60)
    assert not processes_with(f"sleep\x00313.375{RUN}")
    assert printed(env, "echo alive") == "alive\n"


def test_a_session_that_cannot_be_had_ends_no_other(sandbox_alone: ProcessSandbox) -> None:
    # Given a session with a variable, and a fork server that can have no more descriptors
    env, other = open_one(sandbox_alone), open_one(sandbox_alone, "e2")
    printed(env, "X=kept")
    limits = resource.prlimit(fork_server_of(sandbox_alone), resource.RLIMIT_NOFILE)
    resource.prlimit(fork_server_of(sandbox_alone), resource.RLIMIT_NOFILE, (3, limits[1]))
    # When another is asked for; then that fails alone
    outcome = run(other, "echo fresh")
    assert (outcome.status, outcome.cause) == ("failed", "sandbox_failed"), outcome
    assert printed(env, "echo $X") == "kept\n"
    # And there are more as soon as there can be
    resource.prlimit(fork_server_of(sandbox_alone), resource.RLIMIT_NOFILE, limits)
    assert printed(other, "echo fresh") == "fresh\n"


def test_sessions_outlive_the_fork_server_and_others_start(sandbox_alone: ProcessSandbox) -> None:
    # Given a session with a variable
    env = open_one(sandbox_alone)
    printed(env, "X=kept")
    # When the fork server is killed; then the session goes on, and another starts
    os.kill(fork_server_of(sandbox_alone), signal.SIGKILL)
    assert printed(env, "echo $X") == "kept\n"
    assert printed(env, "echo fresh", session="other") == "fresh\n"
    # And both end with the environment
    assert run(env, f"setsid sleep 313.5{RUN} >/dev/null 2>&1 &").exit_code == 0
    env.close()
    assert not processes_with(f"sleep\x00313.5{RUN}\x00")


def test_a_walk_meets_the_child_of_a_process_that_dies_meanwhile() -> None:
    # Given a walk during which a process dies, whose child goes to one that the walk has passed already
    asked = subprocess.run([sys.executable, "-c", HANDED_ON], capture_output=True, text=True, timeout=60, check=False)
    # When it is over; then the child was found, and later that nothing is left
    assert asked.stdout == "True True\n([], True) False\n", asked


def test_a_kill_is_over_when_no_child_is_left_not_when_none_is_found() -> None:
    # Given a process that many walks do not find; when what is below its parent is killed
    asked = subprocess.run([sys.executable, "-c", RUNAWAY], capture_output=True, text=True, timeout=60, check=False)
    # Then that is done only once it has ended
    assert asked.stdout == "[] False\n", asked
