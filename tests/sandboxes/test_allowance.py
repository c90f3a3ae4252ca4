"""An environment is paused where its memory reaches what it is allowed, and goes on as if nothing had been once more is allowed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from app.action_task import Call
from tangram.wire import HEADROOM_MB
from tests.workers_cpu.support import RUN, Followed, admit, followed, printed, until
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecOutcome, Sandbox
from workers.cpu.memory.allowance import ActionMemory, Allowance
from workers.cpu.shell.backend import Backends
from workers.cpu.tasks import measured

from .conftest import params
from .support import Clock
from .test_output import exists

pytestmark = pytest.mark.parametrize("place", params("process-elastic", "bubblewrap-elastic", "container-elastic"))

LIMIT_MB, GRANT_MB = 300, 40
TAKES_100_MB = "python3 -S -c 'print(len(bytearray(100 << 20)))'"
TOOK_100_MB = f"{100 << 20}\n".encode()
numbers, serials = count(), count(1)


@dataclass
class Scheduler:
    """Stands for the scheduler: learns of environments that want memory, and answers them by `answer`, if at once."""

    answer: Callable[[Allowance], int] | None = None
    waiting: queue.Queue[str] = field(default_factory=queue.Queue)
    asked: list[tuple[str, int]] = field(default_factory=list)
    known: dict[str, Allowance] = field(default_factory=dict)

    def take(self, report: dict[str, object]) -> None:
        environment = str(report["environment"])
        if (allowance := self.known.get(environment)) is None:
            return  # another test's
        assert report["allowance_mb"] == allowance.allowed_mb
        self.asked.append((environment, allowance.allowed_mb))
        if self.answer is not None:
            threading.Thread(target=self.allow, args=[allowance, self.answer(allowance)]).start()
        self.waiting.put(environment)

    def allow(self, allowance: Allowance, allowance_mb: int) -> None:
        allowance.allow(allowance_mb, (1, next(serials)))

    def await_pause(self) -> None:
        self.waiting.get(timeout=60)


@pytest.fixture
def scheduler(sandbox: Sandbox) -> Iterator[Scheduler]:
    made = Scheduler()
    sandbox.watcher.on_wanted = made.take
    yield made
    sandbox.watcher.on_wanted = lambda report: None


@pytest.fixture
def opened(sandbox: Sandbox, scheduler: Scheduler) -> Iterator[Callable[[], Environment]]:
    """Give what opens environments of `LIMIT_MB`."""
    environments: list[Environment] = []

    def make() -> Environment:
        environment = sandbox.open(EnvironmentSpec(id=f"allowed-{next(numbers)}", memory_mb=LIMIT_MB))
        environments.append(environment)
        if environment.allowance is None:
            pytest.skip(sandbox.memory_problem)
        scheduler.known[environment.spec.id] = environment.allowance
        return environment

    yield make
    for environment in environments:
        environment.close()


@pytest.fixture
def env(opened: Callable[[], Environment]) -> Environment:
    """Give one that has run a command."""
    environment = opened()
    printed(environment, "true")
    return environment


def allowance_of(environment: Environment) -> Allowance:
    assert environment.allowance is not None
    return environment.allowance


def granted(environment: Environment, command: str, **more: Any) -> tuple[ExecOutcome, ActionMemory]:
    """Carry a command out under a grant of `grant_mb`, by default `GRANT_MB`."""
    with allowance_of(environment).action(more.pop("grant_mb", GRANT_MB), (1, next(serials))) as memory:
        outcome = admit(environment, command, **more).wait()
    return outcome, memory


@contextmanager
def paused(environment: Environment, scheduler: Scheduler, command: str = TAKES_100_MB, **more: float) -> Iterator[Followed]:
    """Have a command run under a grant of `GRANT_MB`, and give it once its environment is paused."""
    with allowance_of(environment).action(GRANT_MB, (1, next(serials))), followed(environment, command, **more) as one:
        scheduler.await_pause()
        assert allowance_of(environment).is_paused
        yield one


GROWS = """
import os, sys, time
held = []
for go in sys.argv[1:]:
    held.append(bytearray(50 << 20))
    while not os.path.exists(go):
        time.sleep(0.01)
print(sum(map(len, held)))
"""


def test_a_command_is_paused_where_its_grant_ends_and_goes_on_when_more_is_allowed(env: Environment, scheduler: Scheduler) -> None:
    env.write_file("grows.py", GROWS.encode())
    with ThreadPoolExecutor() as pool:
        # Given a command that takes more than it was granted, twice, and each time stays at what the kernel allows until it is paused
        command = pool.submit(granted, env, "python3 -S grows.py one two")
        # When the scheduler gives twice as much each time; then it ends well, and the scheduler was asked for each part
        try:
            for go in ("one", "two"):
                scheduler.await_pause()
                env.write_file(go, b"")
                scheduler.allow(allowance_of(env), 2 * allowance_of(env).allowed_mb)
        finally:
            env.write_file("one", b"")
            env.write_file("two", b"")
        outcome, memory = command.result()
    assert (outcome.stdout, outcome.exit_code, outcome.reason) == (TOOK_100_MB, 0, "")
    assert scheduler.asked == [(env.spec.id, 40), (env.spec.id, 80)]
    # And the most that was held is known, and so is what is left, to which the allowance falls
    assert memory.memory_mb is not None and 100 <= memory.memory_mb < 160
    assert memory.resident_mb is not None and memory.resident_mb < HEADROOM_MB
    assert allowance_of(env).allowed_mb == memory.resident_mb + HEADROOM_MB


def test_an_action_that_fails_says_what_its_environment_holds(env: Environment) -> None:
    grant = {"allowance_mb": GRANT_MB, "allowance_serial": next(serials), "epoch": 1}
    call = Call(id="a", grant=grant, header={}, started_at=0.0, began=0.0)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError), measured(call, env):
        raise ConnectionError
    assert call.resident_mb is not None and allowance_of(env).allowed_mb == call.resident_mb + HEADROOM_MB


def test_what_a_command_leaves_running_is_held_and_is_paused_when_it_grows(env: Environment, scheduler: Scheduler) -> None:
    # Given a server that holds 20 MB after the command that started it, and takes 100 more when it is told to
    server = 'import time; a = bytearray(20 << 20); open("up", "w"); open("grow").read()\n'
    env.write_file("server.py", f'{server}b = bytearray(100 << 20); open("grown", "w"); time.sleep(311.5{RUN})'.encode())
    _, memory = granted(env, "mkfifo grow; python3 -S server.py >/dev/null 2>&1 & while [ ! -e up ]; do sleep 0.01; done")
    assert memory.resident_mb is not None and memory.resident_mb >= 20
    # When nothing else runs, and it grows; then it is paused until more is allowed
    printed(env, "echo > grow")
    scheduler.await_pause()
    assert scheduler.asked == [(env.spec.id, min(GRANT_MB, memory.resident_mb + HEADROOM_MB))] and not exists(env, "grown")
    scheduler.allow(allowance_of(env), 200)
    # What is left running has the time of a command meanwhile, and so grows on a busy machine, too
    printed(env, "until [ -e grown ]; do sleep 0.01; done")
    # And while two actions run, nothing is lowered
    with allowance_of(env).action(0, (1, 0)) as second:
        _, first = granted(env, "true", grant_mb=200)
        assert first.resident_mb is None and allowance_of(env).allowed_mb == 200
    assert second.resident_mb is not None and second.resident_mb >= 60


def test_others_in_a_paused_environment_do_not_fail_meanwhile(sandbox: Sandbox, env: Environment, scheduler: Scheduler) -> None:
    starts = "( while :; do /bin/true || echo failed >> failed; done ) >/dev/null 2>&1 & "
    grows = f"{starts} python3 -S grows.py go; kill $!; wait 2>/dev/null; cat failed 2>/dev/null; true"
    env.write_file("grows.py", GROWS.encode())
    with paused(env, scheduler, grows) as one:
        assert until(lambda: allowance_of(env).paused_s() > 0.3)
        # And the scheduler is told again as long as that lasts
        assert env.spec.id in [report["environment"] for report in sandbox.watcher.wanted()]
        env.write_file("go", b"")
        scheduler.allow(allowance_of(env), LIMIT_MB)
        assert one.outcome().stdout == f"{50 << 20}\n".encode()
    assert env.spec.id not in [report["environment"] for report in sandbox.watcher.wanted()]


def test_a_command_that_reads_large_files_is_not_paused(env: Environment, scheduler: Scheduler) -> None:
    # The file stays, so that its pages are still seen at the end of the action, however late the watcher is
    outcome, memory = granted(env, "head -c 200M /dev/zero > large; sync large; for i in 1 2; do cat large | wc -c; done")
    assert outcome.stdout == f"{200 << 20}\n".encode() * 2 and not scheduler.asked
    assert memory.memory_mb is not None and memory.memory_mb < GRANT_MB
    # And the file need not be read from the disk a third time
    assert until(lambda: granted(env, "cat large | wc -c") and allowance_of(env)._controls.use().cache > 180 << 20)


def test_a_command_that_grows_to_the_limit_ends_by_its_own_fault(env: Environment, scheduler: Scheduler) -> None:
    scheduler.answer = lambda allowance: 3 * allowance.allowed_mb
    outcome, _ = granted(env, "python3 -S -c 'bytearray(400 << 20)'")
    assert (outcome.exit_code, outcome.cause) == (137, "out_of_memory"), outcome
    assert outcome.reason == f"the environment's {LIMIT_MB} MB of memory were full: the kernel has ended 1 of its processes"
    assert granted(env, TAKES_100_MB)[0].stdout == TOOK_100_MB


def test_the_time_for_which_a_command_is_paused_does_not_count(
    env: Environment, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    for module in ("shell.run", "shell.backend", "memory.allowance"):
        monkeypatch.setattr(f"workers.cpu.{module}.time", clock)
    with paused(env, scheduler, timeout_s=500.0, output_timeout_s=400.0) as one:
        clock.forward(3600)
        scheduler.allow(allowance_of(env), LIMIT_MB)
        outcome = one.outcome()
    assert (outcome.stdout, outcome.status) == (TOOK_100_MB, "succeeded")
    assert outcome.background_s >= 3600 and outcome.execution_s < 500


def test_a_paused_command_is_cancelled_at_once_and_the_environment_goes_on(env: Environment, scheduler: Scheduler) -> None:
    with paused(env, scheduler) as one:
        one.execution.kill("not wanted any more")
        assert one.outcome().status == "cancelled"
    assert not allowance_of(env).is_paused and granted(env, "echo fine")[0].stdout == b"fine\n"


@pytest.mark.parametrize("what", ["environment", "session"])
def test_a_paused_environment_or_session_can_be_closed(what: str, env: Environment, scheduler: Scheduler) -> None:
    # The action ends as its command does, while the environment is closing
    with ThreadPoolExecutor() as pool:
        action = pool.submit(granted, env, TAKES_100_MB)
        scheduler.await_pause()
        env.close() if what == "environment" else env.close_session("main")
        assert action.result(60)[0].status == "cancelled"


def test_a_command_in_a_fresh_session_waits_while_its_environment_is_paused(
    env: Environment, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ask = [], Backends.is_paused.fget
    monkeypatch.setattr(Backends, "is_paused", property(lambda backends: answers.append(ask(backends)) or answers[-1]))
    # More than the kernel lets be used while the environment is awake
    with paused(env, scheduler, TAKES_100_MB.replace("100", "200")) as one, ExitStack() as sessions:
        # Given a paused environment that is awake, as while another session starts or ends
        with allowance_of(env).awake():
            other = sessions.enter_context(followed(env, "echo other", session="other"))
            assert until(lambda: bool(answers)) and not allowance_of(env).is_paused
            third = sessions.enter_context(followed(env, "echo third", session="third"))
            assert until(lambda: "third" in env._sessions and env._sessions["third"]._backend is not None)  # type: ignore[attr-defined]
        # Then no shell starts until more is allowed, and a command that waits for one can be cancelled
        third.execution.kill("not wanted")
        assert third.outcome().status == "cancelled" and not other.outcomes and all(answers)
        scheduler.allow(allowance_of(env), LIMIT_MB)
        assert other.outcome().stdout == b"other\n" and one.outcome().stdout == f"{200 << 20}\n".encode()
