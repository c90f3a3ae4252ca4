"""`memory_mb` of an environment holds, and a command that hits it says so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from tests.workers_cpu.support import RUN, printed, run
from workers.cpu.abstract import Environment, EnvironmentSpec, Sandbox

EATS_100_MB, EATS_50_MB = (f"python3 -S -c 'print(len(bytearray({size} << 20)))'" for size in (100, 50))
numbers = count()


@pytest.fixture
def env(sandbox: Sandbox, request: pytest.FixtureRequest) -> Iterator[Environment]:
    """Give an environment of so many MB, where the sandbox can hold it to that."""
    if not sandbox.enforces_memory:
        pytest.skip("needs a control group for memory that the worker may write")
    environment = sandbox.open(EnvironmentSpec(id=f"bounded-{next(numbers)}", memory_mb=request.param))
    yield environment
    environment.close()


@pytest.mark.parametrize("env", [64], indirect=True)
def test_a_command_of_too_much_memory_is_killed_and_says_so(env: Environment) -> None:
    outcome = run(env, EATS_100_MB)
    assert (outcome.exit_code, outcome.cause) == (137, "out_of_memory"), outcome
    assert outcome.reason == "the environment's 64 MB of memory were full: the kernel has ended 1 of its processes"
    outcome = run(env, "echo alive")
    assert (outcome.stdout, outcome.reason, outcome.cause) == (b"alive\n", "", "")
    assert run(env, "false").cause == "exit"


@pytest.mark.parametrize("env", [75], indirect=True)
def test_the_sessions_of_an_environment_share_its_memory(env: Environment) -> None:
    assert printed(env, EATS_50_MB) == f"{50 << 20}\n"
    held = f'python3 -S -c \'import time; held = bytearray(50 << 20); open("held", "w"); time.sleep(311.25{RUN})\' >/dev/null 2>&1 &'
    printed(env, f"{held} while [ ! -e held ]; do sleep 0.01; done", session="one")
    assert "75 MB of memory were full" in run(env, EATS_50_MB, session="two").reason
