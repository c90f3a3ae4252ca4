"""What the nursery ends of a keeper that was killed, however long the kernel takes over its death."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from workers.cpu.errors import SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.nursery import Nursery

from .support import until

# A process whose first thread has ended is on the way out, as one that was killed is for a moment: its files may be
# closed, its children are still its own. Here the moment lasts for half a second.
DYING = """
import ctypes, os, subprocess, threading, time
print(subprocess.Popen(["sleep", "313.375"]).pid, flush=True)
threading.Thread(target=lambda: (time.sleep(0.5), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)
"""

NURSERY = f"""
import socket, subprocess, sys, time
from workers.cpu.process import tree
from workers.cpu.process.keeper import Nursery
nursery = Nursery(socket.socketpair()[0])
keeper = subprocess.Popen([sys.executable, "-c", {DYING!r}], stdout=subprocess.PIPE)
orphan = int(keeper.stdout.readline())
nursery.keepers.add(keeper.pid)
while not tree.is_exiting(keeper.pid):
    time.sleep(0.01)
nursery.kill_orphans()
print(tree.read_process(orphan) is None, nursery.keepers)
"""

# While the children of each process are read, the one that was met last dies and is buried, its child having been handed on.
HANDED_ON = """
import os, signal, subprocess
from workers.cpu.process import ending, keeper, tree
keeper.prctl(keeper.PR_SET_CHILD_SUBREAPER, 1)
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
print(tree.settled(os.getpid()), ending.has_children())
"""
# A process that the first walks do not find, as if it forked and ended faster than one goes.
RUNAWAY = """
import os
from workers.cpu.process import ending, keeper, tree
keeper.prctl(keeper.PR_SET_CHILD_SUBREAPER, 1)
walks = []

def blind(*_):
    walks.append(1)
    return ([], True) if len(walks) < 50 else walk(*_)

walk, tree.settled = tree.settled, blind
if os.fork() == 0:
    os.execvp("sleep", ["sleep", "313.421875"])
alarm = ending.Alarm()

def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

print(ending.kill_below(set(), 0.0, alarm, reap), ending.has_children())
"""


def test_what_a_dying_keeper_still_holds_is_waited_for_and_ended() -> None:
    # Given a keeper that has begun to die, whose children the nursery has not got yet; when the nursery is to end what it left
    asked = subprocess.run([sys.executable, "-c", NURSERY], capture_output=True, text=True, timeout=60, check=False)
    # Then its child has ended as soon as the nursery says so, and no keeper is left
    assert asked.stdout == "True set()\n", asked


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


def test_only_what_has_begun_to_die_is_exiting() -> None:
    # Given a process; when it lives, is a zombie, and is gone
    process = subprocess.Popen(["sleep", "313.5"])
    assert not tree.is_exiting(process.pid)
    process.kill()
    # Then it is exiting from its death to its burial
    assert until(lambda: tree.is_exiting(process.pid))
    process.wait()
    assert not tree.is_exiting(process.pid)


def test_a_nursery_that_dies_over_it_has_ended_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a nursery that is killed when it comes to what killed keepers left
    nursery = Nursery()
    before = set(tree.children(os.getpid()))
    nursery.keeper().close()
    (pid,) = set(tree.children(os.getpid())) - before
    os.kill(pid, signal.SIGSTOP)
    asked, send_fds = threading.Event(), socket.send_fds
    monkeypatch.setattr(socket, "send_fds", lambda *asking: (send_fds(*asking), asked.set()))
    with ThreadPoolExecutor() as threads:
        fenced = threads.submit(nursery.kill_orphans)
        assert asked.wait(20)
        os.kill(pid, signal.SIGKILL)
        # When that is waited for; then it is an error, not a success
        with pytest.raises(SessionUnavailable, match="could not be ended"):
            fenced.result()
    nursery.close()
