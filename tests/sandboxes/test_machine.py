"""An environment is one machine: its sessions share files, loopback and processes, and nothing in it speaks of the host."""

from __future__ import annotations

import socket

import pytest

from tests.workers_cpu.support import RUN, admit, followed, printed, run, until
from workers.cpu.abstract import Environment, EnvironmentSpec, Sandbox
from workers.cpu.process.isolation import PLACES

from .conftest import params

pytestmark = pytest.mark.parametrize("place", params("bubblewrap", "view", "container"))
ASKS = "python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).status)' http://localhost:8123/"


def test_sessions_share_temporary_files_servers_and_processes(place: str, env: Environment) -> None:
    folders = ["/tmp", "/dev/shm", *(() if place == "container" else ("/var/tmp",))]
    printed(env, f"for f in {' '.join(folders)}; do echo text >$f/file; done", session="one")
    printed(env, f"sleep 314.125{RUN} >/dev/null 2>&1 & python3 -m http.server 8123 >/dev/null 2>&1 &", session="one")
    assert printed(env, f"cat {' '.join(f'{folder}/file' for folder in folders)}", session="two") == "text\n" * len(folders)
    assert until(lambda: run(env, ASKS, session="two").stdout == b"200\n")
    found = f"grep -l 314.125{RUN} /proc/[0-9]*/cmdline | grep -v self"
    assert len(printed(env, found, session="two").split()) >= 1
    env.close_session("one")
    assert run(env, ASKS, session="two").exit_code == 1
    assert printed(env, "cat /tmp/file", session="two") == "text\n"


def test_a_command_that_ends_all_it_can_reach_ends_itself_and_leaves_the_files(place: str, env: Environment) -> None:
    # In a container what ends all others does not end itself. What holds the namespaces of bubblewrap may be another user's.
    later = "sleep 0.2" if place == "container" else "sleep 30"
    for command in (f"kill -9 -1; {later}", f"kill -9 $PPID; {later}", f"kill -9 2 || exit 9; {later}"):
        printed(env, "echo text >/tmp/file; export KEPT=1; cd /tmp")
        assert run(env, command).exit_code in (137, 9, *((0,) if place == "container" else ())), command
        assert printed(env, "cat file; echo $KEPT") == "text\n1\n"


def test_nothing_that_a_command_prints_names_the_host(place: str, env: Environment) -> None:
    if place == "container":
        pytest.skip("its engine names it")
    looks = (
        "pwd; echo ~; id -un; hostname; env; ps axww -o args; cat /proc/self/mounts /etc/hosts /etc/hostname; ls -la; df; nosuch; cd /no"
    )
    said = run(env, f"{{ {looks}; }} 2>&1").stdout.decode()
    # Then it has a home and a name of its own, and neither the sandbox's folders nor the name of the host are there
    assert said.startswith("/home/user\n/home/user\nuser\nsandbox\n")
    assert str(env.work_folder.parents[1]) not in said  # type: ignore[attr-defined]
    assert socket.gethostname() == "sandbox" or socket.gethostname() not in said
    assert "workers.cpu" not in said


def test_shared_memory_is_bounded(place: str, env: Environment) -> None:
    outcome = run(env, "head -c 100000000 /dev/zero >/dev/shm/file; stat -c %s /dev/shm/file; rm /dev/shm/file")
    assert int(outcome.stdout) == 64 << 20
    assert b"No space left" in outcome.stderr
    assert place == "container" or run(env, "echo text >/dev/file").exit_code == 1


def test_folders_at_the_root_that_tasks_expect_are_its_own(place: str, env: Environment, sandbox: Sandbox) -> None:
    if place == "container":
        pytest.skip("its image has them, or not")
    for folder in PLACES:
        env.write_file(f"{folder}/a/b", b"text\n")
    assert printed(env, f"cat {' '.join(f'{folder}/a/b' for folder in PLACES)}") == "text\n" * len(PLACES)
    other = sandbox.open(EnvironmentSpec(id="other"))
    assert printed(other, f"ls -A {' '.join(PLACES)}") == "\n\n".join(f"{folder}:" for folder in PLACES) + "\n"
    other.close()
    printed(env, f"for f in {' '.join(PLACES)}; do rm -r $f/a && mkdir $f/c || exit; done")


def test_a_command_in_one_session_does_not_end_with_one_in_another(env: Environment) -> None:
    # Given a command, with an orphan of its own, in each of two sessions
    orphan = "(setsid sleep 300 >/dev/null 2>&1 &)"
    count = "grep -lx sleep /proc/[0-9]*/comm | wc -l"
    with followed(env, f"{orphan}; mkfifo /tmp/go; read -r line </tmp/go; echo on", session="one") as first:
        printed(env, orphan, session="two")
        assert until(lambda: run(env, "test -p /tmp/go", session="two").exit_code == 0)
        assert until(lambda: printed(env, count, session="three") == "2\n")
        # When one runs out of time; then of the sleeping programs its own are gone, and no others
        assert admit(env, f"{orphan}; sleep 300", session="two", timeout_s=0.3).wait().status == "timed_out"
        assert printed(env, count, session="three") == "2\n"
        printed(env, "echo >/tmp/go", session="three")
        assert first.outcome().stdout == b"on\n"
    assert printed(env, count, session="three") == "2\n"
