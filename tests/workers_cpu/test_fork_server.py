"""Nothing is left of a session when its connection ends, however its supervisor or the fork server ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.freezing import freeze
from workers.cpu import control_files, home_core
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import make
from .support import HERE, RUN, needs_two_cores, open_one, printed, processes_with, run, until


@pytest.fixture
def sandbox_alone(tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a sandbox whose sessions print the host's ids."""
    with closing(make(tmp_path / "box", "none")) as box:
        yield box


def fork_server_of(box: ProcessSandbox) -> int:
    process = box._fork_client._process
    assert process is not None
    return process.pid


def test_it_finds_the_libraries_that_its_python_needs_and_commands_see_nothing_of_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    with closing(make(tmp_path / "box", "none")) as box:
        assert printed(open_one(box), 'echo "${LD_LIBRARY_PATH-unset}"') == "unset\n"
        assert "LD_LIBRARY_PATH=/opt/python/lib" in Path(f"/proc/{fork_server_of(box)}/environ").read_text().split("\0")


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
    os.kill(fork_server_of(sandbox_alone), signal.SIGCONT)
    assert backend.has_ended(60)
    assert not processes_with(f"sleep\x00313.375{RUN}")
    assert printed(env, "echo alive") == "alive\n"


def test_a_session_that_cannot_be_had_ends_no_other(sandbox_alone: ProcessSandbox) -> None:
    env, other = open_one(sandbox_alone), open_one(sandbox_alone, "e2")
    printed(env, "X=kept")
    limits = resource.prlimit(fork_server_of(sandbox_alone), resource.RLIMIT_NOFILE)
    resource.prlimit(fork_server_of(sandbox_alone), resource.RLIMIT_NOFILE, (3, limits[1]))
    outcome = run(other, "echo fresh")
    assert (outcome.status, outcome.cause) == ("failed", "sandbox_failed"), outcome
    assert printed(env, "echo $X") == "kept\n"
    resource.prlimit(fork_server_of(sandbox_alone), resource.RLIMIT_NOFILE, limits)
    assert printed(other, "echo fresh") == "fresh\n"


def test_sessions_outlive_the_fork_server_and_others_start(sandbox_alone: ProcessSandbox) -> None:
    env = open_one(sandbox_alone)
    printed(env, "X=kept")
    os.kill(fork_server_of(sandbox_alone), signal.SIGKILL)
    assert printed(env, "echo $X") == "kept\n"
    assert printed(env, "echo fresh", session="other") == "fresh\n"
    assert run(env, f"setsid sleep 313.5{RUN} >/dev/null 2>&1 &").exit_code == 0
    folders = sandbox_alone._groups.folders(int(printed(env, "echo $PPID")))
    env.close()
    assert not processes_with(f"sleep\x00313.5{RUN}\x00") and not any(map(os.path.exists, folders))


@needs_two_cores
def test_a_fork_server_has_all_cores_though_the_thread_that_starts_it_has_one(sandbox_alone: ProcessSandbox) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(home_core.go_to, HERE[:1]).result(60)
        assert pool.submit(printed, open_one(sandbox_alone), "echo fresh").result(60) == "fresh\n"
    assert os.sched_getaffinity(fork_server_of(sandbox_alone)) == {*HERE}


def test_the_group_of_a_session_is_removed_once_the_last_process_in_it_has_ended(sandbox_alone: ProcessSandbox) -> None:
    env = open_one(sandbox_alone)
    supervisor = int(printed(env, "echo $PPID"))
    if not (folders := sandbox_alone._groups.folders(supervisor)):
        pytest.skip("there are no control groups here")
    with subprocess.Popen(["sleep", f"313.625{RUN}"]) as stranger:
        try:
            for folder in folders:
                control_files.write(f"{folder}/cgroup.procs", str(stranger.pid))
            env.close_session("main")
            assert all(map(os.path.exists, folders))
        finally:
            stranger.kill()
    printed(env, ":", session="other")
    env.close_session("other")
    assert until(lambda: not any(map(os.path.exists, folders)))
