"""`memory_mb` of an environment holds, and a command that hits it says so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.workers_cpu.support import RUN, printed, run
from workers.cpu.abstract import Environment, EnvironmentSpec, Sandbox

EATS_100_MB, EATS_50_MB = (f"python3 -S -c 'print(len(bytearray({size} << 20)))'" for size in (100, 50))
numbers = count()


def bounded(sandbox: Sandbox, memory_mb: int | None) -> Iterator[Environment]:
    """Give an environment of some memory, where the sandbox can hold it to that."""
    if not sandbox.enforces_memory:
        pytest.skip("needs a control group for memory that the worker may write")
    environment = sandbox.open(EnvironmentSpec(id=f"bounded-{next(numbers)}", memory_mb=memory_mb))
    yield environment
    environment.close()


@pytest.fixture
def small(sandbox: Sandbox) -> Iterator[Environment]:
    yield from bounded(sandbox, 64)


@pytest.fixture
def middling(sandbox: Sandbox) -> Iterator[Environment]:
    yield from bounded(sandbox, 75)


def test_a_command_of_too_much_memory_is_killed_and_says_so(small: Environment) -> None:
    outcome = run(small, EATS_100_MB)
    assert (outcome.exit_code, outcome.cause) == (137, "out_of_memory"), outcome
    assert outcome.reason == "the environment's 64 MB of memory were full: the kernel has ended 1 of its processes"
    outcome = run(small, "echo alive")
    assert (outcome.stdout, outcome.reason, outcome.cause) == (b"alive\n", "", "")
    assert run(small, "false").cause == "exit"


def test_the_sessions_of_an_environment_share_its_memory(middling: Environment) -> None:
    assert printed(middling, EATS_50_MB) == f"{50 << 20}\n"
    held = f'python3 -S -c \'import time; held = bytearray(50 << 20); open("held", "w"); time.sleep(311.25{RUN})\' >/dev/null 2>&1 &'
    printed(middling, f"{held} while [ ! -e held ]; do sleep 0.01; done", session="one")
    assert "75 MB of memory were full" in run(middling, EATS_50_MB, session="two").reason
