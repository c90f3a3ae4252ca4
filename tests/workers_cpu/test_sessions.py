"""Sessions of processes: their supervisor, and shells that do not start, end late or lose their files."""

from __future__ import annotations

import itertools
import os
import re
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.freezing import held
from workers.cpu import pace
from workers.cpu.process import sandbox as sandbox_module
from workers.cpu.process.backend import ProcessBackend
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell import output
from workers.cpu.shell.backend import Exited
from workers.cpu.shell.output import Capture, StreamFifo
from workers.cpu.shell.run_memory import RunMemory

from .conftest import make
from .support import RUN, admit, followed, open_one, printed, processes_with, run, until


def test_a_command_that_hands_in_its_run_again_is_killed_as_soon_as_any_other(
    env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that would wait for ten minutes for a shell to save its state
    monkeypatch.setattr("workers.cpu.shell.session.SAVE_LIMIT_S", 600.0)
    # When a command writes its own run where the shell reads the next one, and times out
    outcome = admit(env, 'd=$(readlink /proc/$$/fd/1); echo "$__tangram_run" >"${d%/*}/go" & sleep 60', timeout_s=0.5).wait()
    # Then it is not waited for, which pytest would end
    assert outcome.status == "timed_out"


def test_the_late_news_of_a_shells_end_is_not_taken_for_that_of_the_next(env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a session with state, whose shell a timeout ends, and a supervisor that says so only when the next one starts
    printed(env, "export KEPT=1")
    ended = Exited(int(printed(env, "echo $$")), 143, 0.0)
    assert admit(env, "sleep 20", timeout_s=0.1).wait().status == "timed_out"
    events = ProcessBackend.events
    monkeypatch.setattr(ProcessBackend, "events", lambda backend: itertools.chain([ended], events(backend)))
    assert printed(env, "echo $KEPT") == "1\n"


def test_a_killed_supervisor_leaves_nothing_and_is_replaced(host_env: ProcessEnvironment) -> None:
    printed(host_env, f"setsid sleep 312.125{RUN} >/dev/null 2>&1 &")
    outcome = run(host_env, "kill -9 $PPID; sleep 5")
    assert outcome.status == "failed"
    assert "supervisor" in outcome.reason
    assert not processes_with(f"312.125{RUN}")
    assert printed(host_env, "echo alive") == "alive\n"


def with_shell(folder: Path, script: str, **more: float) -> ProcessSandbox:
    """Make a sandbox whose shell is a script."""
    (folder / "a-shell").write_text(script)
    (folder / "a-shell").chmod(0o755)
    return ProcessSandbox(folder / "box", isolation="none", shell=str(folder / "a-shell"), **more)


@pytest.mark.parametrize(
    ("script", "limit_s", "reason"),
    [
        (f"#!/bin/sh\nsleep 312.25{RUN}\n", 0.2, "^the shell was not ready within 0.2 s$"),
        ("#!/no/such/interpreter\n", 60.0, "cannot run.*a-shell|a-shell.*cannot run"),
    ],
    ids=["hangs", "has no interpreter"],
)
def test_a_shell_that_does_not_come_up_fails_the_command_with_the_reason(tmp_path: Path, script: str, limit_s: float, reason: str) -> None:
    with closing(with_shell(tmp_path, script, start_timeout_s=limit_s)) as box:
        outcome = run(open_one(box), "true")
        assert outcome.status == "failed" and re.search(reason, outcome.reason), outcome
        assert not processes_with(f"312.25{RUN}")


def test_a_kill_while_a_successor_starts_leaves_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a session with an export whose shell has ended, and a supervisor that is slow to start another
    with closing(ProcessSandbox(tmp_path / "box", isolation="none")) as box:
        env = open_one(box)
        supervisor = int(printed(env, "export Y=2; echo $PPID"))
        run(env, "kill -9 $$")
        asked, spawn = threading.Event(), ProcessBackend.spawn
        monkeypatch.setattr(ProcessBackend, "spawn", lambda *asking: (spawn(*asking), asked.set()))
        # When the next command is killed meanwhile; then it is cancelled, and the one after it finds the export
        execution = admit(env, "true")
        with ThreadPoolExecutor() as threads:
            with held(supervisor):  # also against the SIGCONT that comes before each request to it
                ended = threads.submit(execution.wait)
                assert asked.wait(30)
                execution.kill("enough")
            assert ended.result(60).status == "cancelled"
        assert printed(env, "echo $Y") == "2\n"


def test_what_is_printed_while_the_stream_is_looked_at_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a stream on which something is printed just after a poll has found nothing
    fifo = StreamFifo(str(tmp_path), "out")
    with closing(Capture(fifo.path, RunMemory().printed[0], 100)) as capture, open(fifo.path, "wb", buffering=0) as writer:

        class Poll:
            def register(self, *_: int) -> None: ...

            def poll(self, _: int) -> list[tuple[int, int]]:
                writer.write(b"printed")
                return []

        monkeypatch.setattr(output, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
        # When it is asked whether the stream was opened; then it was, and nothing is lost
        assert capture.was_opened()
        assert capture.finish()
        assert capture.data == b"printed"


@pytest.mark.parametrize("message", ["short", "m" * 30_000])
def test_a_worker_that_is_killed_as_it_notes_how_a_run_stands_leaves_the_run(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception): ...

    write = os.pwrite

    def kill(file: int, data: bytes, at: int) -> None:
        write(file, data[: len(data) // 2], at)
        raise Killed

    memory = RunMemory()
    memory.begin({"name": "run", "message": message})
    memory.note(kill="one")
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(os, "pwrite", kill)
        memory.note(kill="another")
    # The next worker finds it as it was noted last, and goes on with it
    successor = RunMemory(memory.descriptors)
    found = {"name": "run", "message": message, "report": b"", "figures": (0.0,) * 5}
    assert successor.left() == {**found, "kill": "one"}
    successor.note(ending="over")
    assert RunMemory(memory.descriptors).left() == {**found, "kill": "one", "ending": "over"}


def test_removing_the_control_folder_costs_one_command_at_most(env: ProcessEnvironment) -> None:
    printed(env, ":")
    run(env, "rm -rf ../control/*")
    run(env, ":")
    assert printed(env, "echo alive") == "alive\n"


@pytest.mark.parametrize("hostile", ["exit 7", "sleep 1000"])
def test_state_that_no_shell_can_start_with_is_forgotten(either: ProcessEnvironment, hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cpu.shell.execution.LEAST_START_S", 1.0)
    # Given a function that is exported, and state that ends every shell that reads it
    printed(either, ":")
    states: list[Path] = []
    assert until(lambda: bool(states.extend(either.work_folder.parent.glob("control/states/*")) or states))
    (state,) = states
    assert run(either, "kill -9 $$").exit_code == 137
    state.write_text(f"{hostile}\n")
    # When a command runs; then a shell without that state carries it out, unless its time was over before, and keeps state again
    if "sleep" in hostile:
        assert admit(either, ":", timeout_s=0.5).wait().status == "timed_out"
    else:
        assert run(either, ":").status == "succeeded"
    assert printed(either, "export Y=kept; echo alive") == "alive\n"
    assert run(either, "exit 3").exit_code == 3
    assert printed(either, "echo $Y") == "kept\n"


LEASE = """
import fcntl, os, signal, sys
held = os.open(sys.argv[1], os.O_RDONLY)
signal.signal(signal.SIGIO, lambda *_: None)
fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_RDLCK)
os.close(os.open("leased", os.O_CREAT))
while True:
    signal.pause()
"""


def test_a_lease_on_the_file_of_a_command_holds_up_no_other_command(either: ProcessEnvironment) -> None:
    # Given a process that is left with a lease on the file from which its shell has read a command, if it may have one
    either.write_file("lease.py", LEASE.encode())
    waits = "until [ -e leased ] || ! kill -0 $!; do sleep 0.01; done"
    printed(either, f'd=$(readlink /proc/$$/fd/1); python3 lease.py "${{d%/*}}/text" >/dev/null 2>&1 & {waits}')
    # When another command runs; then nobody has waited for the lease, which the kernel takes away in time
    began = time.monotonic()
    printed(either, ":")
    assert time.monotonic() - began < int(Path("/proc/sys/fs/lease-break-time").read_text())


def test_a_program_that_writes_where_ends_are_reported_hides_no_end(either: ProcessEnvironment) -> None:
    flood = 'd=$(readlink /proc/$$/fd/1); head -c 200000 /dev/zero >"${d%/*}/done"'
    assert run(either, f"{flood}; (exit 3)").exit_code == 3
    assert run(either, "exit 4").exit_code == 4


def test_what_a_program_writes_without_end_gets_a_part_of_the_workers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic, clock.sleep = lambda: clock.now, lambda wait_s: setattr(clock, "now", clock.now + wait_s)
    monkeypatch.setattr(pace, "time", clock)
    # When the worker turns to a program again and again; then only the first turns pass at once
    bound = pace.Pace()
    for turn in range(2 * pace.BURST_TURNS):
        bound.keep()
        assert clock.now == pytest.approx(max(0, turn + 1 - pace.BURST_TURNS) * pace.TURN_S)


def test_a_command_that_earlier_ones_let_no_shell_come_to_runs_without_them_or_fails_by_their_fault(tmp_path: Path) -> None:
    # Given shells that are killed as long as a process of another session lives
    script = f'#!/bin/sh\nkill -0 "$(cat {tmp_path}/pid)" 2>/dev/null && kill -9 $$\nexec /bin/sh "$@"\n'
    with closing(with_shell(tmp_path, script)) as box:
        env = open_one(box)
        # When that was left; then it is ended, and the command runs
        printed(env, f"sleep 312.375{RUN} >/dev/null & echo $! >{tmp_path}/pid", session="other")
        assert printed(env, "echo alive") == "alive\n"
        assert not processes_with(f"312.375{RUN}")
        # When a command of the other session is that process; then the program has ended its own command
        with followed(env, f"echo $$ >{tmp_path}/pid; echo begun; sleep 312.375{RUN}", session="other") as hostile:
            assert hostile.prints("begun")
            env.close_session("main")
            outcome = run(env, "echo alive")
            assert (outcome.status, outcome.exit_code, outcome.cause) == ("succeeded", 137, "exit"), outcome
            assert not hostile.outcomes


def test_a_session_that_ends_its_own_init_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a session with state, whose user is the worker's and so that of its init; when a command kills all that it can reach
    monkeypatch.setattr(sandbox_module, "find_users", lambda: None)
    with closing(make(tmp_path / "box", "bubblewrap")) as box:
        inside = open_one(box)
        printed(inside, "export X=1")
        assert run(inside, "kill -9 -1; sleep 5").exit_code == 137
        assert printed(inside, "echo $X") == "1\n"
        assert run(inside, "kill -9 2; sleep 5").exit_code == 137
        assert printed(inside, "echo $X") == "1\n"
