"""How processes are found and held to cores one by one, where no control group does it."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.cpu.abstract import Holding
from workers.cpu.cores import CoreMap
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment

from .support import HERE, RUN, needs_two_cores, printed, processes_with, running, sleepers, until


@given(available=st.sets(st.integers(0, 300), min_size=1), cores=st.lists(st.integers(0, 1000)).map(tuple))
def test_granted_cores_always_lie_on_available_ones(available: set[int], cores: tuple[int, ...]) -> None:
    core_map = CoreMap(tuple(sorted(available)))
    real = core_map.real(cores)
    assert real <= available
    assert real >= available & set(cores)
    assert bool(real) == bool(cores)


@needs_two_cores
def test_a_thread_that_leaves_its_grant_is_brought_back(env: ProcessEnvironment) -> None:
    with running(env, f"sleep 311.28125{RUN}", Holding((HERE[0],))) as (execution, _):
        (pid,) = sleepers(f"311.28125{RUN}")
        os.sched_setaffinity(pid, {HERE[1]})
        assert until(lambda: os.sched_getaffinity(pid) == {HERE[0]})
        # When it chooses one of two that it has; then it stays there, also after the meter, which brings threads back, has looked
        execution.resize(Holding(tuple(HERE[:2])))
        os.sched_setaffinity(pid, {HERE[1]})
        execution._meter.sample()  # type: ignore[attr-defined]
        assert os.sched_getaffinity(pid) == {HERE[1]}


def test_children_are_found_without_the_kernels_children_files(host_env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = int(printed(host_env, f"sleep 311.34375{RUN} >/dev/null 2>&1 & echo $$"))
    with_files = [process.pid for process in tree.descendants(shell)]
    monkeypatch.setattr(tree, "HAS_CHILDREN_FILES", False)
    assert [process.pid for process in tree.descendants(shell)] == with_files
    assert len(with_files) == 1


def test_a_signal_is_not_sent_to_a_later_process_of_the_same_id(host_env: ProcessEnvironment) -> None:
    pid = int(printed(host_env, f"sleep 311.40625{RUN} >/dev/null 2>&1 & echo $!"))
    assert until(lambda: processes_with(f"311.40625{RUN}") == [pid])
    living = tree.read_process(pid)
    assert living is not None
    earlier = tree.Process(pid, living.parent, "S", living.start - 1, 0.0, 0)
    tree.send(earlier, 9)
    assert processes_with(f"311.40625{RUN}") == [pid]
