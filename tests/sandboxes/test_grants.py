"""A command's processes have the cores of their grant, follow a resize, and what they use is counted, all of it and nothing else."""

from __future__ import annotations

import os
import threading

from tests.workers_cpu.support import HERE, RUN, admit, needs_two_cores, printed, processes_with, run, running, sleepers, until
from workers.cpu.abstract import Environment, Holding
from workers.cpu.process import tree
from workers.cpu.process.meter import LONGEST_SAMPLE_S

MASK = "python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)))'"
BURN = 'python3 -S -c "import time\nwhile time.process_time() < 0.3: pass"'


def masks(pids: list[int]) -> list[set[int]]:
    return [os.sched_getaffinity(thread) for pid in pids for thread in tree.threads(pid)]


def test_a_command_and_its_children_run_on_the_granted_cores_and_the_next_has_its_own(env: Environment) -> None:
    for cores in ((HERE[-1],), (HERE[0],), tuple(HERE)):
        seen = " ".join(map(str, cores))
        assert admit(env, f'sh -c "{MASK}"; {MASK}', cores=cores).wait().stdout.decode() == f"{seen}\n" * 2


@needs_two_cores
def test_a_resize_moves_the_whole_tree_with_all_threads(env: Environment) -> None:
    # Given a tree of processes, one of them out of its session, one nobody's child, one with threads, on the first core
    nap = f"311.15625{RUN}"
    threaded = f"python3 -c 'import threading, time\nfor _ in range(3): threading.Thread(target=time.sleep, args=({nap},)).start()'"
    command = f'setsid sleep {nap} & sh -c "sleep {nap}; :" & (setsid sleep {nap} &) ; {threaded} {nap} & wait'
    with running(env, command, Holding((HERE[0],))) as (execution, _):
        assert until(lambda: len(masks(processes_with(nap))) >= 8)
        pids = processes_with(nap)
        assert all(mask == {HERE[0]} for mask in masks(pids))
        # When it gets the second, too, and then that alone; then every thread of every process is there
        for cores in ((HERE[0], HERE[1]), (HERE[1],)):
            execution.resize(Holding(cores))
            assert all(mask == set(cores) for mask in masks(pids))


@needs_two_cores
def test_a_resize_catches_processes_that_are_being_started(env: Environment) -> None:
    nap = f"1.28125{RUN}"
    with running(env, f"while :; do setsid sleep {nap} & sleep 0.002; done", Holding((HERE[0],))) as (execution, _):
        assert until(lambda: len(processes_with(nap)) > 5)
        execution.resize(Holding((HERE[1],)))
        assert until(lambda: all(is_on(HERE[1], pid) for pid in processes_with(nap)))


def is_on(core: int, pid: int) -> bool:
    try:
        return os.sched_getaffinity(pid) == {core}
    except ProcessLookupError:
        return True


def test_usage_is_counted_over_the_tree(env: Environment) -> None:
    # Given a command whose grandchild burns 0.3 s, and holds 60 MB for longer than samples are apart
    program = (
        "import time; block = bytearray(60 << 20)\n"
        "while time.process_time() < 0.3: pass\n"
        f"time.sleep({LONGEST_SAMPLE_S + 0.1})"
    )  # fmt: skip
    outcome = run(env, f"sh -c \"python3 -c '{program}'; :\"; true")
    assert outcome.cpu_s >= 0.28
    assert outcome.max_rss_mb > 55
    assert run(env, "true").cpu_s < 0.28


def test_usage_of_what_is_gone_when_the_command_ends_is_counted(env: Environment) -> None:
    # Given a command that waits for a process which is none of its children, and which burns 0.3 s; then that is counted
    outcome = run(env, f"(setsid sh -c '{BURN}; touch burnt' &); while [ ! -e burnt ]; do sleep 0.02; done; sleep 0.1")
    assert outcome.cpu_s >= 0.28


def test_a_child_that_is_waited_for_late_is_counted_once(env: Environment) -> None:
    # Given a command whose child burns 0.3 s and has ended long before it is waited for
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while time.process_time() < 0.3: pass\n"
        "    os._exit(0)\n"
        f"time.sleep({2 * LONGEST_SAMPLE_S})\n"
        "os.wait()\n"
        f"time.sleep({LONGEST_SAMPLE_S + 0.1})\n"
        "print(sum(os.times()[:4]))"
    )  # fmt: skip
    env.write_file("late.py", program.encode())
    outcome = run(env, "python3 -S late.py")
    assert 0.28 <= outcome.cpu_s < float(outcome.stdout) + 0.28


def test_usage_of_earlier_commands_is_not_counted_when_they_end_meanwhile(env: Environment) -> None:
    # Given processes of earlier commands which have burnt 0.3 s each: one of the shell's, and one that is nobody's child
    program = "import time\nwhile time.process_time() < 0.3: pass\nopen('burnt-$n', 'w')\ntime.sleep(300)"
    burn = f'python3 -S -c "{program}" >/dev/null 2>&1 & echo $!'
    own = printed(env, f"n=1; {burn}; while [ ! -e burnt-1 ]; do sleep 0.02; done").strip()
    orphan = printed(env, f"(n=2; {burn}); while [ ! -e burnt-2 ]; do sleep 0.02; done").strip()
    assert run(env, f"sleep 0.1; kill {own} {orphan}; wait {own}; sleep 0.1; :").cpu_s < 0.28


def test_what_a_command_uses_is_reported_while_it_runs_and_when_it_is_killed(env: Environment) -> None:
    execution = admit(env, f"{BURN}; sleep 300.125{RUN}")
    assert execution.used() is None
    thread = threading.Thread(target=execution.wait)
    thread.start()
    sleepers(f"300.125{RUN}")
    assert until(lambda: (usage := execution.used()) is not None and usage.cpu_s >= 0.28)
    usage = execution.used()
    assert usage is not None
    assert usage.background_cpu_s == 0.0
    execution.kill("end of test")
    thread.join(60)
    assert execution.wait().cpu_s >= 0.28
