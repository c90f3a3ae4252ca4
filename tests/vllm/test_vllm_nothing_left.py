"""Whatever is killed, and in whichever order: none of a server's processes is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.freezing import freeze
from tests.vllm.fakes import gone, until
from workers.gpu.engines.vllm.folders import end_leftovers, make_folder
from workers.gpu.engines.vllm.server import Server

pytestmark = pytest.mark.real

TREE = Path(__file__).with_name("process_tree.py")
PATH = {"PATH": os.environ["PATH"]}
_WORKER = """
import sys
from pathlib import Path
from workers.gpu.engines.vllm.server import Server
state, *command = sys.argv[1:]
server = Server(Path(state) / "log", lambda socket: command, {"PATH": "/usr/bin:/bin"})
server.watch(lambda: None)
sys.stdin.read()
"""
# Each generation lives for two milliseconds, but for the first one, without which the guard would end by itself.
_FORKING = "import os, time\nif os.fork(): time.sleep(600)\nfor _ in range(20000):\n    time.sleep(0.002)\n    if os.fork(): os._exit(0)\n"


class Tree:
    """A worker with a server, and all processes of it."""

    def __init__(self, state: Path) -> None:
        command = [sys.executable, "-S", str(TREE), str(state)]
        self.worker = subprocess.Popen([sys.executable, "-c", _WORKER, str(state), *command], stdin=subprocess.PIPE)
        until((state / "pids").exists)
        self.pids: dict[str, int] = json.loads((state / "pids").read_text())
        self.guard = psutil.Process(self.pids["parent"]).ppid()
        self.folder = Path(os.readlink(f"/proc/{self.guard}/cwd"))

    def kill(self, *which: str) -> None:
        """Send SIGKILL to the worker, the guard or the server, in this order."""
        known = {"worker": self.worker.pid, "guard": self.guard, "server": self.pids["parent"]}
        for name in which:
            with suppress(ProcessLookupError):  # the one before took it along
                os.kill(known[name], signal.SIGKILL)

    def kill_worker_and_guard(self) -> None:
        """Kill both before the guard has done anything about the worker's end."""
        freeze(self.guard)
        self.kill("worker", "guard")
        self.wait_for_worker()

    def wait_for_worker(self) -> None:
        """Wait until the worker has ended; it stays as a zombie, as with a parent that does not care."""
        os.waitid(os.P_PID, self.worker.pid, os.WEXITED | os.WNOWAIT)

    def left(self) -> set[str]:
        """Return what is left of the server."""
        named = {**self.pids, "guard": self.guard}
        return {name for name, pid in named.items() if not gone(pid)} | ({"folder"} if self.folder.exists() else set())


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.kill("worker")
    made.worker.communicate()
    with suppress(ProcessLookupError):
        os.kill(made.pids["unmarked"], signal.SIGKILL)
    end_leftovers(tmp_path)
    until(lambda: not made.left())


@pytest.mark.parametrize("killed", ["worker", "guard", "server"])
def test_one_of_the_three_that_is_killed_takes_all_of_the_server_along(tree: Tree, killed: str) -> None:
    tree.kill(killed)
    # Without a mark of its own, a process is only found below one that has it, and the kernel kills the parent with the guard.
    until(lambda: tree.left() <= ({"unmarked"} if killed == "guard" else set()))


@pytest.mark.parametrize("order", [("guard", "server", "worker"), ("worker", "guard", "server")], ids="-".join)
def test_what_is_left_when_all_three_are_killed_ends_with_the_next_start(tree: Tree, order: tuple[str, ...], tmp_path: Path) -> None:
    tree.kill(*order)
    tree.wait_for_worker()
    end_leftovers(tmp_path)
    # A process that was killed may still be dying, when nothing shows any more whose it was.
    until(lambda: tree.left() <= {"unmarked"})


def test_the_next_worker_says_which_processes_it_found_and_leaves_those_of_others_alone(tree: Tree, tmp_path: Path) -> None:
    # Given servers of a worker that lives, and then of one that is gone, with another state folder
    everything = tree.left()
    assert end_leftovers(tmp_path) == [] and tree.left() == everything
    tree.kill_worker_and_guard()
    (tmp_path / "other").mkdir()
    assert end_leftovers(tmp_path / "other") == [] and "child" in tree.left()
    # When the next worker with that folder starts
    found = end_leftovers(tmp_path)
    assert {tree.pids[name] for name in ("child", "grandchild", "elsewhere", "bare")} <= set(found)
    assert end_leftovers(tmp_path) == []


def test_a_folder_that_is_not_ours_has_nothing_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = make_folder(tmp_path)
    # Given folders of a worker that is gone, in one of which somebody works
    dead = folder.rename(folder.with_name(folder.name.replace(f"-{os.getpid()}-", "-4194305-")))
    link = tmp_path / folder.name.replace(f"-{os.getpid()}-", "-4194306-")
    link.symlink_to(tmp_path)
    beside = subprocess.Popen(["sleep", "600"], cwd=tmp_path)
    inside = subprocess.Popen(["sleep", "600"], cwd=dead)
    # When they are another user's, or one is a link to elsewhere
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert end_leftovers(tmp_path) == [] and dead.exists() and inside.poll() is None
    assert end_leftovers(tmp_path) == [inside.pid]
    # Then nothing is touched through them
    assert inside.wait(60.0) == -signal.SIGKILL and not dead.exists()
    assert beside.poll() is None and link.is_symlink()
    beside.kill()
    beside.wait()


def test_processes_that_fork_while_they_are_killed_end_too(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", lambda socket: [sys.executable, "-S", "-c", _FORKING], PATH)
    until(server.processes)
    # The guard is the child of this process that works in the server's folder.
    (guard,) = [child for child in psutil.Process().children() if works_in(child, server.socket.parent)]
    guard.kill()
    assert server.ended(60.0) == "signal SIGKILL"
    assert server.ended() == "signal SIGKILL"


def works_in(process: psutil.Process, folder: Path) -> bool:
    """Say whether a process works in a folder; one that has ended works nowhere."""
    with suppress(psutil.Error):
        return process.cwd() == str(folder)
    return False


@pytest.mark.parametrize("guarded", [True, False])
def test_a_server_that_is_stopped_leaves_nothing_also_if_its_guard_was_killed(tmp_path: Path, guarded: bool) -> None:
    server = Server(tmp_path / "log", lambda socket: [sys.executable, "-S", str(TREE), str(tmp_path)], PATH)
    until((tmp_path / "pids").exists)
    pids = json.loads((tmp_path / "pids").read_text())
    if not guarded:
        os.kill(psutil.Process(pids["parent"]).ppid(), signal.SIGKILL)
    server.stop()
    until(lambda: {name for name, pid in pids.items() if not gone(pid)} <= (set() if guarded else {"unmarked"}))
    assert not server.socket.parent.exists()
    server.stop()
    with suppress(ProcessLookupError):
        os.kill(pids["unmarked"], signal.SIGKILL)
