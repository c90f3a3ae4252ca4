"""Commands in the background, and what commands leave behind: how they are held, by each means, and that they come back."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from tests.workers_cpu.support import (
    HERE,
    RUN,
    cpu_groups,
    in_background,
    needs_two_cores,
    printed,
    processes_with,
    running,
    sleepers,
    until,
)
from workers.cpu.abstract import Environment, ExecOutcome, ExecRequest, Execution, Holding, Sandbox, Usage
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.errors import ContainerFailed, SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.backend import ProcessBackend
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import KINDS, Boxes, Kind, params
from .support import counts_for, is_held_back, weight_of
from .test_grants import masks

FIRST, BACK = Holding((HERE[0],)), Holding(background=True)
MEANS = [f"{kind}-{means}" for kind in ("process", "bubblewrap") for means in ("cgroup", "affinity")]

STUCK = """
import os
os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, "go", os.O_RDONLY, 0)])
"""
"""A Python program that cannot go on in the kernel (state D) until somebody opens the FIFO `go`: its child has its memory until then."""

on_one_core = pytest.mark.parametrize("place", params("process-affinity", "bubblewrap-affinity", "container"))
"""For tests in which the background gets something: by other means a process gets nothing on a machine that is busy with something else."""


@pytest.fixture(params=params(*MEANS, "container"))
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def by_means(boxes: Boxes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    with ExitStack() as stack:

        @cache
        def find(place: str) -> Sandbox:
            name, _, means = place.partition("-")
            if not means:
                return boxes(place)
            try:
                made = ProcessSandbox(tmp_path_factory.mktemp("b") / "box", isolation=KINDS[name].isolation, background=means)
            except SessionUnavailable as error:
                pytest.skip(str(error))
            stack.callback(made.close)
            return made

        yield find


@pytest.fixture
def sandbox(place: str, by_means: Boxes) -> Sandbox:
    return by_means(place)


def used(execution: Execution) -> Usage:
    return execution.used() or Usage(cpu_s=0.0)


def has_stood(execution: Execution, outcomes: list[ExecOutcome]) -> bool:
    """Wait until a command of one second has stood for longer, and was looked at."""
    began = time.monotonic()
    return until(lambda: (time.monotonic() > began + 1.5 and execution.used() is not None) or bool(outcomes))


def has_lacked_a_core_alone(outcomes: list[ExecOutcome]) -> bool:
    """Wait for the end of a command; say whether it succeeded, and has waited in the background."""
    assert until(lambda: bool(outcomes))
    (outcome,) = outcomes
    return (outcome.status, outcome.exit_code, outcome.background_s > 0) == ("succeeded", 0, True)


TREE = "setsid sleep {0} & (sh -c 'sleep {0}; :' &) ; sleep {0} & wait"


def test_a_command_goes_to_the_background_and_comes_back_with_all_its_processes(sandbox: Sandbox, env: Environment) -> None:
    with running(env, TREE.format(f"301.5{RUN}"), FIRST) as (execution, _):
        pids = sleepers(f"301.5{RUN}", 3)
        for _ in range(2):
            execution.resize(BACK)
            assert all(in_background(pid, sandbox.background) for pid in pids)
            assert masks(pids) == [set(HERE[-1:] if sandbox.background == "affinity" else HERE)] * 3
            execution.resize(FIRST)
            assert sandbox.background == "affinity" or not any(in_background(pid, sandbox.background) for pid in pids)
            assert masks(pids) == [{HERE[0]}] * 3


@on_one_core
def test_what_a_command_gets_in_the_background_is_counted_apart(env: Environment) -> None:
    with running(env, "while :; do :; done", FIRST) as (execution, _):
        assert until(lambda: used(execution).cpu_s > 0.1)
        assert used(execution).background_cpu_s == 0.0
        # When it goes to the background; then what it gets is, and only what it gets from then on
        execution.resize(BACK)
        before = used(execution)
        assert until(lambda: used(execution).background_cpu_s > 0.01, 200.0)
        after = used(execution)
        assert after.background_cpu_s - before.background_cpu_s == pytest.approx(after.cpu_s - before.cpu_s, abs=1e-6)
        execution.resize(FIRST)
        before = used(execution)
        assert until(lambda: used(execution).cpu_s > before.cpu_s + 0.1)
        assert used(execution).background_cpu_s == before.background_cpu_s
        execution.resize(BACK)
        assert until(lambda: used(execution).background_cpu_s > before.background_cpu_s, 200.0)


@pytest.mark.parametrize(
    ("holding", "session"),
    [(FIRST, "server"), (BACK, "server"), (Holding(), "test")],
    ids=["of_the_foreground", "of_the_background", "of_another_session"],
)
def test_what_a_command_left_is_held_back_until_there_is_a_command_and_goes_where_that_is(
    kind: Kind, sandbox: Sandbox, env: Environment, holding: Holding, session: str
) -> None:
    def is_ordinary(pid: int) -> bool:
        return sandbox.background == "affinity" or not is_held_back(kind, sandbox, pid)

    command = f"sleep 303.25{RUN} >/dev/null 2>&1 & (sleep 303.25{RUN} >/dev/null 2>&1 &)"
    env.start(ExecRequest(action_id="a", command=command, holding=holding, session="server")).wait()
    pids = sleepers(f"303.25{RUN}", 2)
    assert all(is_held_back(kind, sandbox, pid) for pid in pids)
    # When a command runs in the foreground; then it is there too, on the cores of that
    with running(env, f"sleep 303.5{RUN}", FIRST, session=session) as (execution, _):
        every = [*pids, *sleepers(f"303.5{RUN}")]
        assert masks(every) == [{HERE[0]}] * 3
        assert all(map(is_ordinary, every))
        # And so is what a command leaves meanwhile
        printed(env, f"sleep 303.875{RUN} >/dev/null 2>&1 &", session="another")
        (late,) = sleepers(f"303.875{RUN}")
        assert masks([late]) == [{HERE[0]}] and is_ordinary(late)
        execution.resize(BACK)
        assert kind.parks or all(in_background(pid, sandbox.background) for pid in pids)
        execution.resize(Holding((HERE[-1],)))
        assert masks(pids) == [{HERE[-1]}] * 2
        assert all(map(is_ordinary, pids))
    assert all(is_held_back(kind, sandbox, pid) for pid in (*pids, late))


def test_a_command_starts_in_the_background_with_its_dop_and_all_that_it_starts(sandbox: Sandbox, env: Environment) -> None:
    nap = f"303.9375{RUN}"
    starts = f"echo $TANGRAM_DOP >dop; until [ -e go ]; do sleep 0.01; done; setsid sleep {nap} & (setsid sleep {nap} &); wait"
    with running(env, starts, BACK, dop=3):
        env.write_file("go", b"")
        assert until(lambda: len(processes_with(f"sleep\x00{nap}\x00")) == 2, 200.0)
        assert until(lambda: all(in_background(pid, sandbox.background) for pid in sleepers(nap, 2)))
        assert env.read_file("dop") == b"3\n"


@pytest.mark.parametrize("error", [ContainerFailed("the engine does not answer"), OSError("the group is gone")], ids=["engine", "group"])
def test_a_kill_is_carried_out_where_the_command_cannot_be_brought_to_the_foreground(
    env: Environment, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: object, holding: Holding) -> None:
        raise error

    with running(env, f"sleep 301.9375{RUN}", BACK) as (execution, outcomes):
        sleepers(f"301.9375{RUN}")
        monkeypatch.setattr(type(execution._backend), "hold", fail)  # type: ignore[attr-defined]
        execution.kill("enough")
        assert until(lambda: bool(outcomes))
    assert (outcomes[0].status, outcomes[0].reason) == ("cancelled", "enough")
    assert not processes_with(f"sleep\x00301.9375{RUN}\x00")


@on_one_core
def test_time_without_a_core_does_not_count(sandbox: Sandbox, env: Environment) -> None:
    # Given a busy command in the background, beside others on each core that it may use
    cores = HERE[-1:] if sandbox.background == "affinity" else HERE
    spin, count = "while [ ! -e go ]; do :; done", len(cores) + 2
    others = " & ".join([f"( touch busy-{number}; {spin} )" for number in range(count)])
    with ExitStack() as ends:
        ends.enter_context(running(env, f"{others} & wait", Holding(tuple(cores)), session="others"))
        assert until(lambda: printed(env, "ls", session="look").count("busy-") == count)
        execution, outcomes = ends.enter_context(running(env, spin, BACK, timeout_s=1.0, output_timeout_s=1.0))
        assert has_stood(execution, outcomes)
        env.write_file("go", b"")
        assert has_lacked_a_core_alone(outcomes), outcomes


@on_one_core
def test_time_in_which_a_command_cannot_go_on_in_the_kernel_does_not_count(env: Environment) -> None:
    # Given a command in the background that is held up in the kernel, as by a lock whose holder has no core
    command = f"mkfifo go; echo $$ >pid; exec python3 -c '{STUCK}'"
    with running(env, f"sh -c {shlex.quote(command)}", BACK, timeout_s=1.0, output_timeout_s=1.0) as (execution, outcomes):
        is_stuck = "until [ -e pid ] && grep -q '^State:.D' /proc/$(cat pid)/status; do sleep 0.05; done"
        assert printed(env, is_stuck, session="other") == ""
        assert has_stood(execution, outcomes)
        assert printed(env, "echo on 1<>go", session="other") == ""
        assert has_lacked_a_core_alone(outcomes), outcomes


def test_what_a_command_sleeps_in_the_background_is_execution(env: Environment) -> None:
    with running(env, "echo $$ >pid; mkfifo go; read -r line <go", BACK) as (execution, outcomes):
        waits = "until [ -p go ] && grep -q '^State:.S' /proc/$(cat pid)/status; do sleep 0.05; done"
        assert printed(env, waits, session="other") == ""
        # Until some of its sleep has been seen, however seldom a busy machine looks
        meter = execution._meter  # type: ignore[attr-defined]
        assert until(lambda: bool(outcomes) or meter.waited_s - meter.starved_s > 0.5, 200.0)
        # When it has got it, for which it wants a core, and may have to wait for one
        assert printed(env, "echo on >go", session="other") == ""
        assert until(lambda: bool(outcomes))
    (outcome,) = outcomes
    assert min(outcome.execution_s, outcome.slept_s) > 0.25, outcome


def test_a_command_that_sleeps_in_the_background_is_out_of_time_as_elsewhere(env: Environment) -> None:
    with running(env, "sleep 300; true", BACK, timeout_s=0.1) as (_, outcomes):
        assert until(lambda: bool(outcomes))
    assert (outcomes[0].status, outcomes[0].reason) == ("timed_out", "ran longer than 0.1 s")


@pytest.mark.parametrize("place", params("process-affinity", "bubblewrap-affinity"))
def test_a_command_in_the_background_is_out_of_time_once_it_has_used_it(env: Environment) -> None:
    with running(env, "while :; do :; done", BACK, timeout_s=0.5) as (_, outcomes):
        assert until(lambda: bool(outcomes), 200.0)
    assert outcomes[0].status == "timed_out"


# -- containers alone: what is written at which change is in `tests/containers/test_cgroup_v2.py` --------------------------


def weight_of_container(env: ContainerEnvironment) -> int:
    """Return for how many cores the container's own group counts. With version 2 its process 1 is in a leaf below it."""
    return counts_for(group.parent if group.name == "init" else group for group in cpu_groups(env.container.pid))


@pytest.mark.parametrize("place", params("container"))
def test_a_container_counts_for_the_cores_of_its_commands(env: ContainerEnvironment) -> None:
    # Given two commands of one environment, on two cores and on one; then each counts for its cores, the container for all
    both = Holding(tuple(HERE[:2]))
    with running(env, f"sleep 305.0625{RUN}", both) as (execution, _), running(env, f"sleep 305.1875{RUN}", FIRST, "other"):
        (wide,), (narrow,) = sleepers(f"305.0625{RUN}"), sleepers(f"305.1875{RUN}")
        assert (weight_of(wide), weight_of(narrow), weight_of_container(env)) == (2, 1, 3)
        execution.resize(FIRST)
        assert (weight_of(wide), weight_of_container(env)) == (1, 2)
        execution.resize(BACK)
        assert (in_background(wide, "cgroup"), weight_of_container(env)) == (True, 1)
        execution.resize(both)
        assert (weight_of(wide), weight_of_container(env)) == (2, 3)


# -- processes alone ------------------------------------------------------------------------------------------------------

of_processes = pytest.mark.parametrize("place", params(*MEANS))
by_groups = pytest.mark.parametrize("place", params("process-cgroup", "bubblewrap-cgroup"))


@needs_two_cores
@by_groups
def test_a_command_in_the_foreground_counts_for_its_cores(sandbox: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given commands one after the other on two cores, one, and again two; then each counts for so many where weights divide cores
    both = Holding(tuple(HERE[:2]))
    for holding, count in ((both, 2), (FIRST, 1), (both, 2)):
        with running(env, f"sleep 301.125{RUN}", holding) as (execution, _):
            (pid,) = sleepers(f"301.125{RUN}", 1)
            assert weight_of(pid) == count
            # When it goes to the background and comes back, and gets fewer or more cores; then it counts for those that it has
            execution.resize(BACK)
            assert in_background(pid, "cgroup")
            for other, more in ((holding, count), (FIRST, 1), (both, 2)):
                execution.resize(other)
                assert weight_of(pid) == more
            # Its end takes one core, wherever it runs
            execution.resize(BACK)
            execution.resize(Holding())
            assert weight_of(pid) == 1


@of_processes
def test_a_change_that_fails_can_be_tried_again(sandbox: ProcessSandbox, env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(env, f"sleep 301.0625{RUN}", FIRST) as (execution, _):
        (pid,) = sleepers(f"301.0625{RUN}")
        with monkeypatch.context() as patch:
            patch.setattr(ProcessBackend, "hold", lambda self, holding: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                execution.resize(BACK)
        # When it is sent again; then it goes, since it is not taken to be there
        execution.resize(BACK)
        assert in_background(pid, sandbox.background)


@of_processes
def test_nothing_goes_to_the_background_while_its_environment_closes(
    sandbox: ProcessSandbox, env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a command whose environment begins to close
    with running(env, f"trap '' TERM; sleep 301.6875{RUN} & wait", FIRST) as (execution, outcomes):
        sleepers(f"301.6875{RUN}")
        backend = execution._backend
        sent: list[object] = []
        monkeypatch.setattr(type(backend._background), "send", lambda self, members: sent.append(members))
        env.hang_up()
        # When a change comes late; then it has no effect, whichever way it comes
        execution.resize(BACK)
        backend.hold(BACK)
        assert until(lambda: bool(outcomes))
    assert not sent


@needs_two_cores
@by_groups
def test_a_process_that_has_left_its_control_group_is_held_to_the_grant(sandbox: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a command that leaves the group of its session, as root can
    assert sandbox._groups.cpu is not None
    with running(env, f"sleep 301.5625{RUN}", FIRST) as (execution, _):
        (pid,) = sleepers(f"301.5625{RUN}")
        try:
            (Path(sandbox._groups.cpu).parent / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            pytest.skip(f"version 2 has no processes beside groups: {error}")
        execution.resize(Holding((HERE[1],)))
        assert os.sched_getaffinity(pid) == {HERE[1]}


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_process_wants_a_core_if_any_thread_does(is_busy: bool) -> None:
    other = "iter(int, 1)" if is_busy else "[time.sleep(300)]"
    program = f"import threading, time; threading.Thread(target=lambda: [None for _ in {other}], daemon=True).start(); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", program]) as child:

        def has_slept() -> bool:
            found = tree.read_process(child.pid)
            return found is not None and (found.state, found.thread_count) == ("S", 2) and tree.wants_core(found) == is_busy

        found = until(has_slept)
        child.kill()
    assert found
