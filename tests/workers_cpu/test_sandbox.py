"""Process sandboxes: nothing is left behind, also by a killed worker, and many environments at once work."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from glob import glob
from pathlib import Path

import psutil
import pytest

from tests.freezing import freeze
from tests.sandboxes.test_life import descriptors
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.errors import ImageUnsupported, SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.groups import find_groups
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import Shared
from .support import RUN, open_one, printed, processes_with, run, sleepers, until, worker_to_be_killed


def test_images_are_refused(shared: Shared) -> None:
    with pytest.raises(ImageUnsupported, match="python:3"):
        shared("none").open(EnvironmentSpec(id="e1", image="python:3"))


def test_an_unknown_shell_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SessionUnavailable, match="no-such-shell"):
        ProcessSandbox(tmp_path / "box", shell="no-such-shell")


def test_limits_reach_the_command(tmp_path: Path) -> None:
    with closing(ProcessSandbox(tmp_path / "box", limits=ProcessLimits(open_files=64, file_size_mb=1))) as box:
        limited = open_one(box)
        assert printed(limited, "ulimit -n") == "64\n"
        assert run(limited, "head -c 2000000 /dev/zero > big").exit_code != 0
        assert len(limited.read_file("big")) == 1 << 20


def test_a_sandbox_waits_for_what_ends_the_commands_of_a_killed_worker(tmp_path: Path) -> None:
    # Given a killed worker, and processes that would end its commands but do not get to it
    nap = f"315.59375{RUN}"
    with worker_to_be_killed(tmp_path / "box", ("e1", "main", f"setsid sleep {nap} &"), ("e1", "main", f"sleep {nap}")) as worker:
        assert sleepers(nap, 2)
        below = {process.pid for process in tree.descendants(worker.process.pid)}
        cleanup = below.intersection(processes_with("workers.cpu.handover.fork_server"))
        for pid in cleanup:
            freeze(pid)
        worker.kill()
    # When a sandbox takes over the folder; then it does so only once they are done
    with ThreadPoolExecutor() as threads:
        taking = threads.submit(ProcessSandbox, tmp_path / "box")
        try:
            early, _ = wait([taking], timeout=0.5)
        finally:
            for pid in cleanup:
                os.kill(pid, signal.SIGCONT)
        with closing(taking.result()):
            assert not early and not processes_with(nap)


def test_a_killed_worker_leaves_no_process_and_no_group_and_the_next_starts_empty(tmp_path: Path) -> None:
    # Given a worker with a process that was left behind and a running command in the background, and where its sandbox makes groups
    groups = find_groups(os.path.realpath(tmp_path / "box"))
    left, runs = f"touch file; setsid sleep 315.671875{RUN} &", f"setsid sleep 315.671875{RUN} & while :; do :; done"
    with worker_to_be_killed(tmp_path / "box", ("e1", "main", left), ("e1", "main", runs), background=True) as worker:
        assert sleepers(f"315.671875{RUN}", 2)
        worker.kill()
    # Then all its processes end, with their groups
    assert until(lambda: not processes_with(f"315.671875{RUN}") and not processes_with(str(tmp_path)))
    assert until(lambda: not any(glob(f"{prefix}-*") for prefix in (groups.cpu, groups.memory) if prefix))
    # And the next sandbox of that folder starts empty
    with closing(ProcessSandbox(tmp_path / "box")) as box:
        assert printed(open_one(box), "ls") == ""


def test_an_idle_environment_leaves_no_zombies_behind_its_commands(host_env: ProcessEnvironment) -> None:
    shell = int(printed(host_env, "(setsid true &) ; (true &) ; sh -c 'true & true &' ; echo $$"))
    supervisor = psutil.Process(shell).parent()
    assert supervisor is not None
    assert until(lambda: [child.pid for child in supervisor.children(recursive=True)] == [shell])


def test_open_environments_hold_nothing_before_their_first_command(sandbox: ProcessSandbox) -> None:
    children = set(psutil.Process().children())
    before, environments = descriptors(), list[ProcessEnvironment]()
    environments.extend(open_one(sandbox, f"e{number}") for number in range(10))
    assert descriptors() <= before
    assert set(psutil.Process().children()) <= children
    # And one in which a command has run costs a descriptor for its session, two for the memory of that, and one for its namespaces
    assert run(environments[0], "true").exit_code == 0
    with_first = descriptors()
    assert run(environments[1], "true").exit_code == 0
    assert descriptors() <= with_first + 4
