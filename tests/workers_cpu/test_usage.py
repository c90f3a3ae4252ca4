"""What a command's processes use is counted, all of it and nothing else, and reported while they run."""

from __future__ import annotations

import threading

from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.meter import LONGEST_SAMPLE_S

from .support import admit, printed, run, until


def test_usage_is_counted_over_the_tree(env: ProcessEnvironment) -> None:
    # Given a command whose grandchild burns 0.3 s, and holds 60 MB for longer than samples are apart
    program = (
        "import time; block = bytearray(60 << 20)\n"
        "while time.process_time() < 0.3: pass\n"
        f"time.sleep({LONGEST_SAMPLE_S + 0.1})"
    )  # fmt: skip
    # When it runs
    outcome = run(env, f"sh -c \"python3 -c '{program}'; :\"; true")
    # Then both are counted
    assert outcome.cpu_s >= 0.28
    assert outcome.max_rss_mb > 55
    # And a command that does nothing is not charged for it
    assert run(env, "true").cpu_s < 0.28


def test_usage_of_what_is_gone_when_the_command_ends_is_counted(env: ProcessEnvironment) -> None:
    # Given a command that waits for a process which is none of its children, and which burns 0.3 s
    burn = 'python3 -c "import time\nwhile time.process_time() < 0.3: pass"'
    outcome = run(env, f"(setsid sh -c '{burn}; touch burnt' &); while [ ! -e burnt ]; do sleep 0.02; done; sleep 0.1")
    # When it has ended after it; then what that one used is counted
    assert outcome.cpu_s >= 0.28


def test_a_child_that_is_waited_for_late_is_counted_once(env: ProcessEnvironment) -> None:
    # Given a command whose child burns 0.3 s and has ended long before it is waited for
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while time.process_time() < 0.3: pass\n"
        "    os._exit(0)\n"
        "time.sleep(2)\n"
        "os.wait()\n"
        f"time.sleep({LONGEST_SAMPLE_S + 0.1})\n"
        "print(sum(os.times()[:4]))"
    )  # fmt: skip
    env.write_file("late.py", program.encode())
    # When it runs; then what the child used is counted once, as the kernel does
    outcome = run(env, "python3 -S late.py")
    assert 0.28 <= outcome.cpu_s < float(outcome.stdout) + 0.28


def test_usage_of_earlier_commands_is_not_counted_when_they_end_meanwhile(env: ProcessEnvironment) -> None:
    # Given processes of earlier commands which have burnt 0.3 s each: one of the shell's, and one that is nobody's child
    program = "import time\nwhile time.process_time() < 0.3: pass\nopen('burnt-$n', 'w')\ntime.sleep(300)"
    burn = f'python3 -c "{program}" >/dev/null 2>&1 & echo $!'
    own = printed(env, f"n=1; {burn}; while [ ! -e burnt-1 ]; do sleep 0.02; done").strip()
    orphan = printed(env, f"(n=2; {burn}); while [ ! -e burnt-2 ]; do sleep 0.02; done").strip()
    # When a later one ends them; then it is not charged for that
    outcome = run(env, f"sleep 0.1; kill {own} {orphan}; wait {own}; sleep 0.1; :")
    assert outcome.cpu_s < 0.28


def test_what_a_command_uses_is_reported_while_it_runs_and_when_it_is_killed(env: ProcessEnvironment) -> None:
    # Given a command that burns 0.3 s in a child, and goes on
    execution = admit(env, "python3 -c 'import time\nwhile time.process_time() < 0.3: pass'; sleep 300")
    assert execution.used() is None
    thread = threading.Thread(target=execution.wait)
    thread.start()
    # When it is asked meanwhile; then it says what was used, nothing of it in the background
    assert until(lambda: (usage := execution.used()) is not None and usage.cpu_s >= 0.28)
    usage = execution.used()
    assert usage is not None
    assert usage.background_cpu_s == 0.0
    # When it is killed; then it is in its outcome, too
    execution.kill("end of test")
    thread.join(60)
    assert execution.wait().cpu_s >= 0.28
