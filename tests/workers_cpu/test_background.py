"""How processes are sent to the background by each means, and what goes wrong meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandboxes.conftest import params
from workers.cpu.abstract import Holding
from workers.cpu.errors import SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.backend import ProcessBackend
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import environment_in
from .support import HERE, RUN, in_background, running, sleepers, until, weight_of

BACK = Holding(background=True)


@pytest.fixture(scope="module", params=params("process-cgroup", "process-affinity", "bubblewrap-cgroup", "bubblewrap-affinity"))
def box(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSandbox]:
    isolation, _, means = request.param.replace("process", "none").partition("-")
    try:
        made = ProcessSandbox(tmp_path_factory.mktemp("b") / "box", isolation=isolation, background=means)
    except SessionUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def env(box: ProcessSandbox) -> Iterator[ProcessEnvironment]:
    yield from environment_in(box)


def test_a_command_in_the_foreground_counts_for_its_cores(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given commands one after the other on two cores, one, and again two; then each counts for so many where weights divide cores
    if box.background != "cgroup":
        pytest.skip("cores are divided by the weight of each session")
    if len(HERE) < 2:
        pytest.skip("needs two cores")
    both = Holding(tuple(HERE[:2]))
    for holding, counts_for in ((both, 2), (Holding((HERE[0],)), 1), (both, 2)):
        with running(env, f"sleep 301.125{RUN}", holding) as (execution, _):
            (pid,) = sleepers(f"301.125{RUN}", 1)
            assert weight_of(pid) == counts_for
            # When it goes to the background and comes back, and gets fewer or more cores; then it counts for those that it has
            execution.resize(BACK)
            assert in_background(pid, "cgroup")
            for other, more in ((holding, counts_for), (Holding((HERE[0],)), 1), (both, 2)):
                execution.resize(other)
                assert weight_of(pid) == more
            # Its end takes one core, wherever it runs
            execution.resize(BACK)
            execution.resize(Holding())
            assert weight_of(pid) == 1


def test_a_change_that_fails_can_be_tried_again(box: ProcessSandbox, env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(env, f"sleep 301.0625{RUN}", Holding((HERE[0],))) as (execution, _):
        (pid,) = sleepers(f"301.0625{RUN}")
        with monkeypatch.context() as patch:
            patch.setattr(ProcessBackend, "hold", lambda self, holding: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                execution.resize(BACK)
        execution.resize(BACK)
        assert in_background(pid, box.background)


def test_nothing_goes_to_the_background_while_its_environment_closes(
    box: ProcessSandbox, env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a command whose environment begins to close
    with running(env, f"trap '' TERM; sleep 301.6875{RUN} & wait", Holding((HERE[0],))) as (execution, outcomes):
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


def test_a_process_that_has_left_its_control_group_is_held_to_the_grant(box: ProcessSandbox, env: ProcessEnvironment) -> None:
    # Given a command that leaves the group of its session, as root can
    if box.background != "cgroup" or len(HERE) < 2:
        pytest.skip("needs a control group and two cores")
    assert box._groups.cpu is not None
    with running(env, f"sleep 301.5625{RUN}", Holding((HERE[0],))) as (execution, _):
        (pid,) = sleepers(f"301.5625{RUN}")
        try:
            (Path(box._groups.cpu).parent / "cgroup.procs").write_text(str(pid))
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
