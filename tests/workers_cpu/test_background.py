"""Commands in the background, and what commands leave behind: how they are held, by each means, and that they come back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from glob import glob
from pathlib import Path

import pytest

from app.action_task import ActionTask, Call
from workers.cpu.abstract import EnvironmentSpec, ExecOutcome, ExecRequest, Execution, Holding
from workers.cpu.errors import SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.isolation import Isolation
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.weight import Means

from .support import in_background, printed, processes_with, until, weight_of, worker_to_be_killed

HERE = sorted(os.sched_getaffinity(0))
BACK = Holding(background=True)
ALL: list[tuple[Isolation, Means]] = [
    (isolation, means) for isolation in ("none", "bubblewrap") for means in ("cgroup", "autogroup", "affinity")
]  # type: ignore[misc]


@pytest.fixture(params=ALL, ids=["-".join(each) for each in ALL])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a sandbox of each isolation that holds the background by each means that work here."""
    isolation, means = request.param
    try:
        made = ProcessSandbox(tmp_path / "box", isolation=isolation, background=means)
    except SessionUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def env(box: ProcessSandbox) -> ProcessEnvironment:
    """Give an environment."""
    return box.open(EnvironmentSpec(id="e1"))


@contextmanager
def running(env: ProcessEnvironment, command: str, holding: Holding, **more: float) -> Iterator[tuple[Execution, list[ExecOutcome]]]:
    """Have a command run as long as the block lasts; its outcome is there once it has ended."""
    execution = env.start(ExecRequest(action_id="a", command=command, holding=holding, **more))  # type: ignore[arg-type]
    outcomes: list[ExecOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(execution.wait()))
    thread.start()
    try:
        yield execution, outcomes
    finally:
        execution.kill("end of test")
        thread.join(30)
    assert outcomes


def sleepers(number: str, count: int) -> list[int]:
    """Return the processes `sleep number`, once there are so many."""
    marker = f"sleep\x00{number}"
    assert until(lambda: len(processes_with(marker)) == count), processes_with(marker)
    return processes_with(marker)


def masks(pids: list[int]) -> list[set[int]]:
    return [os.sched_getaffinity(thread) for pid in pids for thread in tree.threads(pid)]


TREE = "setsid sleep {0} & (sh -c 'sleep {0}; :' &) ; sleep {0} & wait"


def test_a_command_goes_to_the_background_and_comes_back_with_all_its_processes(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a command with a child out of its session and an orphan, on the first core
    with running(env, TREE.format("301.5"), Holding((HERE[0],))) as (execution, _):
        pids = sleepers("301.5", 3)
        for _ in range(2):
            # When it goes to the background; then all of it is there, on any core that the background may use
            execution.resize(BACK)
            assert all(in_background(pid, box.background) for pid in pids)
            assert masks(pids) == [set(HERE[-1:] if box.background == "affinity" else HERE)] * 3
            # When it comes back; then none is, and all of it is on its core
            execution.resize(Holding((HERE[0],)))
            assert box.background == "affinity" or not any(in_background(pid, box.background) for pid in pids)
            assert masks(pids) == [{HERE[0]}] * 3


def test_a_command_in_the_foreground_counts_for_its_cores(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given commands one after the other on two cores, one, and again two; then each counts for so many where weights divide cores
    if box.background != "cgroup":
        pytest.skip("cores are divided by the weight of each session")
    if len(HERE) < 2:
        pytest.skip("needs two cores")
    both = Holding(tuple(HERE[:2]))
    for holding, counts_for in ((both, 2), (Holding((HERE[0],)), 1), (both, 2)):
        with running(env, "sleep 301.125", holding) as (execution, _):
            (pid,) = sleepers("301.125", 1)
            assert weight_of(pid) == counts_for
            # When it goes to the background and comes back, and gets fewer or more cores; then it counts for those that it has
            execution.resize(BACK)
            assert in_background(pid, "cgroup")
            for other, more in ((holding, counts_for), (Holding((HERE[0],)), 1), (both, 2)):
                execution.resize(other)
                assert weight_of(pid) == more
            # Its end is worth one core, wherever it runs
            execution.resize(BACK)
            execution.resize(Holding())
            assert weight_of(pid) == 1


def test_what_a_command_gets_in_the_background_is_counted_apart(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a busy command on a core; then nothing is counted for the background
    def used(execution: Execution) -> tuple[float, float]:
        usage = execution.used()
        return (usage.cpu_s, usage.background_cpu_s) if usage is not None else (0.0, 0.0)

    with running(env, "while :; do :; done", Holding((HERE[0],))) as (execution, _):
        assert until(lambda: used(execution)[0] > 0.1)
        assert used(execution)[1] == 0.0
        # When it goes to the background; then what it gets is, and only what it gets from then on
        execution.resize(BACK)
        before, _ = used(execution)
        assert until(lambda: used(execution)[1] > 0.03)
        cpu_s, background_cpu_s = used(execution)
        assert background_cpu_s == pytest.approx(cpu_s - before, abs=0.011)
        # When it comes back; then the figure stands, and the whole one goes on
        execution.resize(Holding((HERE[0],)))
        cpu_s, background_cpu_s = used(execution)
        assert until(lambda: used(execution)[0] > cpu_s + 0.1)
        assert used(execution)[1] == background_cpu_s
        # When it is sent there again; then it goes on from there
        execution.resize(BACK)
        assert until(lambda: used(execution)[1] > background_cpu_s + 0.03)


def test_a_command_starts_in_the_background_and_is_told_its_dop(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a command of DoP 3 in the background; when it runs; then it is told that, and held there
    with running(env, "echo $TANGRAM_DOP >dop; sleep 301.25", BACK, dop=3):
        (pid,) = sleepers("301.25", 1)
        assert in_background(pid, box.background)
        assert env.read_file("dop") == b"3\n"


def test_what_a_command_leaves_behind_is_in_the_background_until_the_next_command(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a command on the first core that leaves two processes, one of them nobody's child; when it is over
    command = "sleep 301.75 >/dev/null 2>&1 & (sleep 301.75 >/dev/null 2>&1 &)"
    env.start(ExecRequest(action_id="a", command=command, holding=Holding((HERE[0],)))).wait()
    pids = sleepers("301.75", 2)
    # Then both are in the background
    assert all(in_background(pid, box.background) for pid in pids)
    # When the next command runs; then they are ordinary like that, and in the background again once it is over
    with running(env, "sleep 302.75", Holding((HERE[0],))):
        (command_pid,) = sleepers("302.75", 1)
        assert masks([*pids, command_pid]) == [{HERE[0]}] * 3
        assert box.background == "affinity" or not any(in_background(pid, box.background) for pid in (*pids, command_pid))
    assert all(in_background(pid, box.background) for pid in pids)


def test_a_session_without_anything_left_is_not_in_the_background(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a session whose last command was in the background; when it is over; then the shell is not
    shell = int(printed(env, "cut -d' ' -f6 /proc/self/stat") if box.isolation == "none" else "0")
    env.start(ExecRequest(action_id="a", command="true", holding=BACK)).wait()
    if shell:
        assert masks([shell]) == [set(HERE)]
        assert box.background == "affinity" or not in_background(shell, box.background)
    # And the next command has its grant
    assert printed(env, "echo done") == "done\n"


def test_a_kill_reaches_a_command_in_the_background(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a command in the background that notes the signal; when it is killed; then it has had the time to
    with running(env, "trap 'echo ended >note; exit' TERM; sleep 301.875 & wait", BACK) as (execution, outcomes):
        sleepers("301.875", 1)
        execution.kill("enough")
        assert until(lambda: bool(outcomes))
        assert (outcomes[0].status, outcomes[0].reason) == ("cancelled", "enough")
    assert not processes_with("sleep\x00301.875")


def spin_until(path: str) -> str:
    return f"while [ ! -e {path} ]; do :; done"


def test_time_without_a_core_does_not_count(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a command in the background that sleeps for longer than it may run
    with running(env, f"sleep 1; {spin_until('go')}", BACK, timeout_s=0.5, output_timeout_s=0.5) as (execution, outcomes):
        # When it has used half of its time
        assert until(lambda: bool((usage := execution.used()) and usage.cpu_s > 0.2) or bool(outcomes))
        env.write_file("go", b"")
        assert until(lambda: bool(outcomes))
    # Then it has ended by itself, and what it waited is told apart
    (outcome,) = outcomes
    assert outcome.status == "succeeded", outcome
    assert outcome.waited_s > 0.9
    assert outcome.execution_s == pytest.approx(outcome.cpu_s, abs=0.1)


def test_a_command_in_the_background_is_out_of_time_once_it_has_used_it(env: ProcessEnvironment) -> None:
    # Given commands in the background that use all they can get; when one may run for half a second; then that is its end
    with running(env, "while :; do :; done", BACK, timeout_s=0.5) as (_, outcomes):
        assert until(lambda: bool(outcomes))
    assert outcomes[0].status == "timed_out"
    assert outcomes[0].cpu_s > 0.4


def test_a_killed_worker_leaves_nothing_in_the_background(tmp_path: Path) -> None:
    # Given a worker with a busy command in the background
    with worker_to_be_killed(tmp_path / "box", "301.59375", "background") as worker:
        # When it is killed; then the next one of its folder finds no process and no group of it
        worker.kill()
    box = ProcessSandbox(tmp_path / "box")
    assert not processes_with("301.59375")
    assert not any(glob(f"{prefix}-*") for prefix in filter(None, astuple(box._groups)))
    box.close()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs privileges to give up, and setpriv")
def test_a_worker_without_privileges_does_not_send_what_it_cannot_take_back() -> None:
    # Given a process without any capability; when it tries the means that take some; then they do not work there
    program = "from workers.cpu.process.trial import *; print([works(means, Groups()) for means in MEANS], find_means(Groups()))"
    argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", sys.executable, "-c", program]
    told = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]).stdout
    assert told == "[False, False, True] affinity\n"


def test_the_parts_of_an_action_that_waited_in_the_background_add_up() -> None:
    # Given a call that was queued for a second, and waited for two in the background
    now = time.time()
    grant = {"submitted_at": now - 10.0, "received_at": now - 9.0, "granted_at": now - 8.0, "units": 3}
    call = Call(id="a", grant=grant, header={}, started_at=now, began=0.0, execution_s=4.0, waited_s=2.0)  # type: ignore[arg-type]
    # When its result is made; then what it waited counts as queued, and all parts are its time
    payload = ActionTask._payload(call, None)
    assert (payload["dop"], payload["act"]["execution_s"]) == (3, 4.0)
    assert payload["act"]["queue_s"] == pytest.approx(3.0)
    assert sum(payload["act"].values()) == pytest.approx(10.0, abs=0.5)  # type: ignore[arg-type]
