"""Process environments outlive a worker that is killed, or they end. What holds for each kind is in `tests/sandboxes/test_adoption.py`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import closing
from functools import partial
from glob import glob
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from app.local.kept_environments import SOCKET, end_kept, folder_of
from workers.cpu.abstract import ExecRequest, Loss
from workers.cpu.cores import CoreMap
from workers.cpu.docker.backend import SHELL, ContainerBackends
from workers.cpu.handover.protocol import VERSION
from workers.cpu.memory.pause_trial import Memory
from workers.cpu.process.groups import find_groups
from workers.cpu.process.isolation import IsolationChoice
from workers.cpu.process.limits import ProcessLimits
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell.run_types import both_ends, waits_in

from .conftest import EITHER, Shared, make
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


@pytest.fixture
def isolation(request: pytest.FixtureRequest, shared: Shared) -> IsolationChoice:
    """Give an isolation that works here."""
    shared(request.param)
    return request.param  # type: ignore[no-any-return]


def leaves(seconds: str) -> str:
    """Return a command that leaves a process, and ends once that sleeps: what is left gets hardly any time of a busy machine."""
    return f'setsid sleep {seconds} & until [ "$(cat /proc/$!/comm)" = sleep ]; do sleep 0.01; done'


def kill(worker: Worker) -> None:
    """Kill a worker once all its commands are over."""
    assert worker.is_idle()
    worker.kill()


def ids(box: ProcessSandbox) -> list[str]:
    return [environment.spec.id for environment in box.environments()]


def next_worker(base: Path, isolation: IsolationChoice = "none", memory: Memory = "fixed") -> closing[ProcessSandbox]:
    return closing(make(base, isolation, keep_s=KEEP_S, memory=memory))


def asked(name: str, command: str, **limits: Any) -> ExecRequest:
    """Return a command of the action and in the session `name`, with which the next worker may go on."""
    return ExecRequest(action_id=name, command=command, session=name, message=f"message of {name}", **limits)


def killed_as_it_takes_a_report(frame: FrameType, event: str, function: object) -> None:
    """Kill this process once the shell's report has left the FIFO; a function for `threading.setprofile`."""
    if event == "c_return" and function in (os.read, os.splice) and frame.f_code.co_name in ("_read_report", "take_report"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_as_it_takes_a_report_loses_none(tmp_path: Path) -> None:
    # Given a worker that is killed in the moment in which it has taken the report of a command
    ends, runs = asked("ends", "echo once >> ~/ends; (exit 3)"), ("e", "main", "true")
    threading.setprofile(killed_as_it_takes_a_report)
    try:
        with to_be_killed(tmp_path, runs, side_by_side=[ends]) as worker:
            threading.setprofile(None)
            worker.process.join(60)
            assert worker.process.exitcode == -signal.SIGKILL
    finally:
        threading.setprofile(None)
    # When the next one goes on with it; then the command has its code, and has not run again
    with next_worker(tmp_path) as box:
        env = box.get("e")
        assert env.start(ends).wait().exit_code == 3
        assert printed(env, "cat ~/ends", session="ends") == "once\n"


def test_a_command_that_cannot_go_on_ends_and_its_environment_stays(tmp_path: Path) -> None:
    # Given a worker with a command that has no message, and what an earlier one has left in its session; when the worker is killed
    left = ("busy", "other", f"A=1; {leaves(f'317.5{RUN}')}")
    with to_be_killed(tmp_path, left, ("busy", "other", f"setsid sleep 317.625{RUN} & sleep 317.625{RUN}")) as worker:
        assert sleepers(f"317.625{RUN}", 2)
        worker.kill()
    with next_worker(tmp_path) as box:
        assert ids(box) == ["busy"] and not box.left_messages and not processes_with(f"317.625{RUN}")
        assert sleepers(f"317.5{RUN}") and printed(box.get("busy"), "pwd", session="other")


def saves_once(path: Path) -> str:
    """Return a command after which the shell does not save its state until there is a file."""
    return f"""trap 'case $BASH_COMMAND in *"export -p"*) until [ -e {path} ]; do sleep 0.01; done;; esac' DEBUG"""


def test_an_environment_whose_shell_saves_for_long_what_its_command_has_left_goes_on(tmp_path: Path) -> None:
    # Given a worker that is killed when the end of a command is told, and whose shell saves for long
    may_save = tmp_path / "may-save"
    with to_be_killed(tmp_path, ("e", "main", f"export SET=1; {saves_once(may_save)}")) as worker:
        kill(worker)
    # When the next one begins; then the environment stands, and its next command follows once the shell has saved
    with next_worker(tmp_path) as box:
        (state,) = tmp_path.glob("environments/e/control/states/*")
        assert ids(box) == ["e"] and "SET" not in state.read_text()
        may_save.touch()
        assert printed(box.get("e"), "echo $SET") == "1\n"


def test_a_command_that_has_ended_before_the_next_worker_begins_leaves_what_it_has_set(tmp_path: Path) -> None:
    # Given a worker that is killed while a command without a message runs, whose shell will save for long
    box, may_save = tmp_path / "box", tmp_path / "may-save"
    waits = f"echo $$ > {tmp_path}/shell; until [ -e {tmp_path}/go ]; do sleep 0.01; done"
    with to_be_killed(box, ("e", "main", f"export SET=1; {saves_once(may_save)}; {waits}")) as worker:
        assert until(lambda: (tmp_path / "shell").exists() and (tmp_path / "shell").read_text() != "")
        worker.kill()
    # When it ends, and then the next worker begins
    (done,) = box.rglob("done")
    with open(both_ends(str(done)), "rb", buffering=0) as reports:
        (tmp_path / "go").touch()
        assert until(lambda: waits_in(reports.fileno()) > 0)
    with next_worker(box) as sandbox:
        # Then its shell still saves
        assert Path(f"/proc/{(tmp_path / 'shell').read_text().strip()}").exists()
        (state,) = box.glob("environments/e/control/states/*")
        assert "SET" not in state.read_text()
        may_save.touch()
        assert printed(sandbox.get("e"), "echo $SET") == "1\n"


def test_a_worker_that_sets_environments_up_in_another_way_ends_them(tmp_path: Path) -> None:
    with to_be_killed(tmp_path, ("e", "main", f"sleep 317.75{RUN} &")) as worker:
        kill(worker)
    with closing(make(tmp_path, "none", ProcessLimits(open_files=100), keep_s=KEEP_S)) as box:
        assert not ids(box) and not processes_with(f"317.75{RUN}")
        # And it says so, until there is another one of that id
        assert box.losses() == (Loss("e", "this worker would set it up in another way: limits"),)
        assert printed(open_one(box, "e"), "ls; ulimit -n") == "100\n" and not box.losses()


@pytest.mark.parametrize("isolation", EITHER, indirect=True)
def test_environments_end_when_no_worker_comes_in_time_or_the_stack_ends(tmp_path: Path, isolation: IsolationChoice) -> None:
    base = tmp_path / "environments" / "cpu-0"
    left = ("e", "main", leaves(f"317.875{RUN}"))
    with to_be_killed(base, left, isolation=isolation) as worker:
        kill(worker)
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


def test_environments_end_when_their_node_joins_another_shard(tmp_path: Path) -> None:
    base = folder_of(tmp_path, "cpu-0", shard=0, shards=2)
    with to_be_killed(base, ("e", "main", leaves(f"317.90625{RUN}"))) as worker:
        kill(worker)
    assert folder_of(tmp_path, "cpu-0", shard=0, shards=2) == base and sleepers(f"317.90625{RUN}")
    other = folder_of(tmp_path, "cpu-0", shard=1, shards=2)
    assert not processes_with(f"317.90625{RUN}")
    for folder in (other, base):  # it may also come back
        with next_worker(folder) as box:
            assert not ids(box)


def test_a_program_of_an_environment_cannot_be_the_next_worker(tmp_path: Path) -> None:
    # Given a program that asks for everything as the next worker does; when the worker is killed
    base, told = tmp_path / "box", tmp_path / "told"
    (tmp_path / "intruder.py").write_text(INTRUDER)
    intrudes = f"setsid {sys.executable} {tmp_path}/intruder.py {base}/{SOCKET} {told} >/dev/null 2>&1 &"
    waits = f"until [ -e {told}.asked ]; do sleep 0.01; done"  # what a command has left gets hardly any time of a busy machine
    with to_be_killed(base, ("e", "main", f"A=1; {intrudes} {waits}")) as worker:
        kill(worker)
    assert until(told.exists) and until(lambda: told.read_bytes() == b"told: ")
    with next_worker(base) as box:
        assert printed(box.get("e"), "echo $A") == "1\n"


def test_environments_whose_fork_server_was_killed_are_not_gone_on_with(tmp_path: Path) -> None:
    # Given a worker with an environment that loses its fork server, so that another one is started for a further session
    before = ("before", "main", f"sleep 317.9375{RUN} & kill -9 $(ps -o ppid= -p $PPID)")
    with to_be_killed(tmp_path, before, ("before", "more", "true"), ("after", "main", "B=2")) as worker:
        kill(worker)
    with next_worker(tmp_path) as box:
        assert ids(box) == ["after"] and not box.losses() and printed(box.get("after"), "echo $B") == "2\n"
        assert until(lambda: not processes_with(f"317.9375{RUN}"))


GROWS = "held = bytearray(200 << 20); print(len(held), flush=True)"
"""This is more than the kernel gives before the worker looks."""


def kill_once_both_are_paused(worker: Worker, base: Path) -> None:
    (waits,) = base.rglob("waits")
    waits.rename(waits.with_name("go"))
    worker.await_pause()
    worker.await_pause()
    worker.kill()


def test_environments_of_a_worker_that_books_limits_go_on_in_one_that_grants_memory_by_action(tmp_path: Path) -> None:
    with to_be_killed(tmp_path / "box", ("e", "main", "export SET=1"), ("e", "other", leaves(f"319.25{RUN}"))) as worker:
        kill(worker)
    with next_worker(tmp_path / "box", memory="elastic") as box:
        if box.memory_problem:
            pytest.skip(box.memory_problem)
        assert printed(box.get("e"), "echo $SET") == "1\n" and processes_with(f"319.25{RUN}")
        # And new ones can be paused
        assert open_one(box, "new").allowance is not None
    assert not processes_with(f"319.25{RUN}")


@pytest.mark.parametrize("isolation", EITHER, indirect=True)
def test_what_is_paused_for_memory_goes_on_in_the_next_worker_or_ends(tmp_path: Path, isolation: IsolationChoice) -> None:
    # Given a worker that may pause environments: in one a server takes too much, in one a command does
    with closing(make(tmp_path / "trial", isolation, memory="elastic")) as trial:
        if trial.memory_problem:
            pytest.skip(trial.memory_problem)
    serves = f'import os, time\nopen("waits", "w")\nwhile not os.path.exists("go"): time.sleep(0.01)\n{GROWS}; time.sleep(318.25{RUN})'
    # And its shell is paused before it has saved what its command has left: very much
    much = "for i in {1..20000}; do declare -x V$i=$i; done"
    server = f"python3 -S -c '{serves}' > said 2>&1 & until [ -e waits ]; do sleep 0.01; done; {much}"
    commands = [("server", "main", server), ("busy", "main", f"python3 -S -c '{GROWS}' {RUN}")]
    # When both are paused, and the worker is killed
    with to_be_killed(tmp_path, *commands, grant_mb=40, isolation=isolation, memory="elastic") as worker:
        kill_once_both_are_paused(worker, tmp_path)
    with next_worker(tmp_path, isolation, "elastic") as box:
        # Then the command has ended, and the server is paused until more is allowed
        assert sorted(ids(box)) == ["busy", "server"] and not processes_with(f"{GROWS} {RUN}")
        env = box.get("server")
        assert env.allowance is not None and until(lambda: env.allowance is not None and env.allowance.is_paused)
        assert env.read_file("said") == b""
        env.allowance.allow(300, (2, 1))
        # And it pauses no more: the server has grown while a command runs, which gives it the time that such a one gets
        assert printed(env, "until [ -s said ]; do sleep 0.01; done; cat said") == f"{200 << 20}\n"
    # And where no worker comes in time, both end
    with to_be_killed(tmp_path, *commands, grant_mb=40, isolation=isolation, memory="elastic", keep_s=0.5) as worker:
        kill_once_both_are_paused(worker, tmp_path)
    assert until(lambda: not processes_with(f"318.25{RUN}") and not processes_with(f"{GROWS} {RUN}"))
    freezers = find_groups(tmp_path).freezer
    assert freezers is None or until(lambda: not glob(f"{freezers}-*"))


def test_a_session_of_a_container_that_cannot_be_read_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / SHELL).mkdir()
    made, make = list[int](), os.eventfd
    monkeypatch.setattr(os, "eventfd", lambda *given: made.append(make(*given)) or made[-1])
    ended = make(0)
    container: Any = SimpleNamespace(has_ended=lambda: False, ended=ended, allowance=None)
    client: Any = SimpleNamespace(keep=lambda *_, **__: None)
    control: Any = SimpleNamespace(folder=str(tmp_path), name="main")
    with pytest.raises(IsADirectoryError):
        ContainerBackends(container, CoreMap((0,)), "env-1", client).adopt(control, None)
    os.close(ended)
    (wakeup,) = made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(wakeup)
