"""Environments outlive a worker that is killed: the next one in its folder goes on with them, or they end."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from glob import glob
from pathlib import Path

import pytest

from app.local.kept import SOCKET, end_kept
from workers.cpu.memory.trial import Memory
from workers.cpu.process.groups import find_groups
from workers.cpu.process.isolation import IsolationChoice
from workers.cpu.process.keeping import VERSION
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import make
from .support import RUN, Worker, open_one, printed, processes_with, sleepers, until, worker_to_be_killed

KEEP_S = 120.0
to_be_killed = partial(worker_to_be_killed, keep_s=KEEP_S, isolation="none")

# A program of an environment that wants to be the next worker, and writes what it is told.
INTRUDER = f"""
import json, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
    channel.connect(sys.argv[1])
    channel.send(json.dumps({{"adopt": {VERSION}, "keep_s": 1.0}}).encode())
    open(sys.argv[2] + ".asked", "w").close()
    try:
        said = channel.recv(4096)
    except ConnectionError:
        said = b""
open(sys.argv[2], "wb").write(b"told: " + said)
"""


def kill(worker: Worker) -> None:
    """Kill a worker once all its commands are over."""
    assert worker.is_idle()
    worker.kill()


def ids(box: ProcessSandbox) -> list[str]:
    return [environment.spec.id for environment in box.environments()]


def next_worker(base: Path, isolation: IsolationChoice = "none", memory: Memory = "fixed") -> closing[ProcessSandbox]:
    """Return the sandbox of a worker that is started again."""
    return closing(make(base, isolation, keep_s=KEEP_S, memory=memory))


@pytest.mark.parametrize("isolation", ["none", "view", "bubblewrap"])
def test_idle_environments_go_on_with_files_sessions_and_what_they_left_running(tmp_path: Path, isolation: IsolationChoice) -> None:
    # Given a worker with an environment that has a shell with variables, one that has ended, and a program that prints on and on
    make(tmp_path / "trial", isolation).close()
    box, ready = tmp_path / "box", tmp_path / "box" / "environments"
    sets = "cd /tmp && export SET=1; unexported=2; greet() { echo hello $1; }; umask 027"
    prints = f"cd ~; echo text > file; (while :; do echo on; sleep 0.02; done) & echo $! > prints; sleep 317.25{RUN} & cd /tmp"
    asked = [("e", "main", sets), ("e", "main", prints), ("e", "ended", "cd /tmp; export LEFT=3"), ("e", "ended", "exit 4")]
    # When it is killed, and so is the next one, which has used it
    with to_be_killed(box, *asked, ("other", "main", "true"), isolation=isolation) as worker:
        kill(worker)
    with to_be_killed(box, ("e", "main", "unexported=$unexported+"), ("other", "last", "true"), isolation=isolation) as worker:
        kill(worker)
    # Then the one after that has all of it
    with next_worker(box, isolation) as third:
        assert ids(third) == ["e", "other"]
        env = third.get("e")
        assert printed(env, "pwd; echo $SET $unexported; greet you; umask") == "/tmp\n1 2+\nhello you\n0027\n"
        assert printed(env, "kill -0 $(cat ~/prints) && echo prints on") == "prints on\n"
        assert printed(env, "pwd; echo $LEFT", session="ended") == "/tmp\n3\n"
        assert env.read_file("file") == b"text\n"
        # And others can be opened, and it can be closed
        assert printed(open_one(third, "new"), "echo fine") == "fine\n"
        env.close()
        assert not processes_with(f"317.25{RUN}") and ids(third) == ["other", "new"]
    assert not processes_with(str(box)) and not list(ready.iterdir())


def test_an_environment_in_which_a_command_runs_is_ended_and_others_go_on(tmp_path: Path) -> None:
    # Given a worker with an idle environment, and one with a command that runs; when it is killed
    busy = [("busy", "main", "true"), ("busy", "other", f"setsid sleep 317.5{RUN} & sleep 317.5{RUN}")]
    with to_be_killed(tmp_path, ("idle", "main", "A=1"), *busy) as worker:
        assert sleepers(f"317.5{RUN}", 2)
        worker.kill()
    # Then the next one has only the idle one, and nothing is left of the other
    with next_worker(tmp_path) as box:
        assert ids(box) == ["idle"] and printed(box.get("idle"), "echo $A") == "1\n"
        assert not processes_with(f"317.5{RUN}") and [one.name for one in (tmp_path / "environments").iterdir()] == ["idle"]


def test_a_worker_that_sets_environments_up_in_another_way_ends_them(tmp_path: Path) -> None:
    with to_be_killed(tmp_path, ("e", "main", f"sleep 317.75{RUN} &")) as worker:
        kill(worker)
    with closing(make(tmp_path, "none", ProcessLimits(open_files=100), keep_s=KEEP_S)) as box:
        assert not ids(box) and not processes_with(f"317.75{RUN}")
        assert printed(open_one(box, "e"), "ls; ulimit -n") == "100\n"


@pytest.mark.parametrize("isolation", ["none", "bubblewrap"])
def test_environments_end_when_no_worker_comes_in_time_or_the_stack_ends(tmp_path: Path, isolation: IsolationChoice) -> None:
    # Given environments whose worker was killed, which wait for another one for long
    make(tmp_path / "trial", isolation).close()
    base = tmp_path / "environments" / "cpu-0"
    left = ("e", "main", f"setsid sleep 317.875{RUN} &")
    with to_be_killed(base, left, isolation=isolation) as worker:
        kill(worker)
    # When the stack ends, then they are gone
    assert sleepers(f"317.875{RUN}")
    end_kept(tmp_path)
    assert not processes_with(f"317.875{RUN}")
    # And when they wait no longer, they go by themselves
    with to_be_killed(base, left, isolation=isolation, keep_s=0.5) as worker:
        assert sleepers(f"317.875{RUN}")
        kill(worker)
    assert until(lambda: not processes_with(f"317.875{RUN}"))
    with next_worker(base, isolation) as box:
        assert not ids(box)


def test_a_program_of_an_environment_cannot_be_the_next_worker(tmp_path: Path) -> None:
    # Given a program that asks for everything as the next worker does; when the worker is killed
    base, told = tmp_path / "box", tmp_path / "told"
    (tmp_path / "intruder.py").write_text(INTRUDER)
    intrudes = f"setsid {sys.executable} {tmp_path}/intruder.py {base}/{SOCKET} {told} >/dev/null 2>&1 &"
    waits = f"until [ -e {told}.asked ]; do sleep 0.01; done"  # what a command has left gets hardly any time of a busy machine
    with to_be_killed(base, ("e", "main", f"A=1; {intrudes} {waits}")) as worker:
        kill(worker)
    # Then it is told nothing, and the next worker has the environment
    assert until(told.exists) and until(lambda: told.read_bytes() == b"told: ")
    with next_worker(base) as box:
        assert printed(box.get("e"), "echo $A") == "1\n"


def test_environments_whose_fork_server_was_killed_are_not_gone_on_with(tmp_path: Path) -> None:
    # Given a worker with an environment that loses its fork server, so that another one is started for a further session
    before = ("before", "main", f"sleep 317.9375{RUN} & kill -9 $(ps -o ppid= -p $PPID)")
    with to_be_killed(tmp_path, before, ("before", "more", "true"), ("after", "main", "B=2")) as worker:
        kill(worker)
    # When that worker is killed; then the next one goes on with what was opened since, and nothing of the other is left
    with next_worker(tmp_path) as box:
        assert ids(box) == ["after"] and printed(box.get("after"), "echo $B") == "2\n"
        assert until(lambda: not processes_with(f"317.9375{RUN}"))


GROWS = "held = bytearray(200 << 20); print(len(held), flush=True)"
"""This is more than the kernel gives before the worker looks."""


def let_go(base: Path) -> None:
    """Have the server grow, whose command is over."""
    (waits,) = base.rglob("waits")
    waits.rename(waits.with_name("go"))


@pytest.mark.parametrize("isolation", ["none", "bubblewrap"])
def test_what_is_paused_for_memory_goes_on_in_the_next_worker_or_ends(tmp_path: Path, isolation: IsolationChoice) -> None:
    # Given a worker that may pause environments: in one a server takes too much, in one a command does
    with closing(make(tmp_path / "trial", isolation, memory="elastic")) as trial:
        if trial.memory_problem:
            pytest.skip(trial.memory_problem)
    serves = f'import os, time\nwhile not os.path.exists("go"): time.sleep(0.01)\n{GROWS}; time.sleep(318.25{RUN})'
    server = f"python3 -S -c '{serves}' > said 2>&1 & touch waits"
    commands = [("server", "main", server), ("busy", "main", f"python3 -S -c '{GROWS}' {RUN}")]
    # When both are paused, and the worker is killed
    with to_be_killed(tmp_path, *commands, grant_mb=40, isolation=isolation, memory="elastic") as worker:
        let_go(tmp_path)
        worker.await_pause()
        worker.await_pause()
        worker.kill()
    with next_worker(tmp_path, isolation, "elastic") as box:
        # Then the one that was busy has ended, and the other is paused until more is allowed
        assert ids(box) == ["server"] and not processes_with(f"{GROWS} {RUN}")
        env = box.get("server")
        assert env.allowance is not None and until(lambda: env.allowance is not None and env.allowance.is_paused)
        assert env.read_file("said") == b""
        env.allowance.allow(300, (2, 1))
        assert until(lambda: env.read_file("said") == f"{200 << 20}\n".encode())
        # And it pauses no more
        assert printed(env, "echo fine") == "fine\n"
    # And where no worker comes in time, both end
    with to_be_killed(tmp_path, *commands, grant_mb=40, isolation=isolation, memory="elastic", keep_s=0.5) as worker:
        let_go(tmp_path)
        worker.await_pause()
        worker.await_pause()
        worker.kill()
    assert until(lambda: not processes_with(f"318.25{RUN}") and not processes_with(f"{GROWS} {RUN}"))
    freezers = find_groups(tmp_path).freezer
    assert freezers is None or until(lambda: not glob(f"{freezers}-*"))
