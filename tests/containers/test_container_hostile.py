"""Programs that attack their container, their session and their neighbours: they hurt themselves alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.workers_cpu.support import RUN, admit, followed, printed, processes_with, run, until
from workers.cpu.abstract import EnvironmentSpec, ExecOutcome, ExecRequest
from workers.cpu.docker.engine import DockerEngine
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.init import STATES_INSIDE
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone

from .conftest import node_name
from .support import containers, groups_of, neighbour_at_work, processes_of, sandbox_threads

pytestmark = pytest.mark.real

NAP = f"322.7341{RUN}"
"""A time to sleep that no other program here sleeps."""


@dataclass(frozen=True)
class Hostile:
    """A command, and what it must come to; `codes` are the exit codes of one that may succeed.

    One that is to run out of time has `timeout_s`; for the others a busy machine has more than enough.
    """

    name: str
    command: str
    status: str
    reason: str = ""
    codes: tuple[int, ...] = ()
    timeout_s: float = 1.0
    may_fail_for: str = ""
    """A cause for which it may fail instead, where two limits are reached at once and either may be noticed first."""


LATE = "ran longer than"
CONTROL = "/run/tangram"

HOSTILE = [
    # A shell that cannot fork ends: this one forks once, and needs no process of its own to be there until it is late.
    Hostile("forks and exits", "f() { f & f & }; f & while :; do :; done", "timed_out", LATE),
    # The size of one file and what the environment writes in all have the same limit.
    Hostile("one large file", "yes > big", "succeeded", codes=(153,), may_fail_for="disk_limit"),
    Hostile(
        "files that are open but removed",
        'i=3; while [ $i -lt 9 ]; do eval "exec $i>x"; rm x; eval "head -c 25000000 /dev/zero >&$i"; i=$((i+1)); done; sleep 20',
        "failed",
        "to disk",
    ),
    Hostile("folders without end", "while mkdir d && cd d; do :; done; sleep 20", "failed", "deeper"),
    Hostile("empty files", "i=0; while :; do : > $i; i=$((i+1)); done", "failed", "to disk"),
    Hostile("kills process 1", "kill -9 1; kill -TERM 1; kill -STOP 1; kill -HUP 1; kill -USR1 1; true", "succeeded", codes=(0,)),
    Hostile("stops all", "kill -STOP -1; kill -STOP $$", "timed_out", LATE),
    Hostile(
        "changes and removes the control files",
        f"cd {CONTROL}; chmod -R 777 .; for f in alive */go */text */launch; do echo 'exit 66' >$f; done;"
        f"for f in */*; do rm -f $f; ln -s /etc/passwd $f; done; mv {CONTROL} /tmp; rm -rf {CONTROL}/* {CONTROL}; true",
        "succeeded",
        codes=(0,),
    ),
    Hostile("reads alive", f"cat {CONTROL}/alive", "timed_out", LATE),
    Hostile("steals runs", f"cat {CONTROL}/*/go", "timed_out", LATE),
    Hostile(
        "reports of no run, of no number and without a code",
        f"cd {CONTROL}; for said in 'ready 0' '00 0' \"$__tangram_run x\" $__tangram_run; do echo $said >$(echo */done); done; sleep 20",
        "timed_out",
        LATE,
    ),
    Hostile("a report too early", f"for f in {CONTROL}/*/done; do echo $__tangram_run 9 >$f; done; sleep 20", "succeeded", codes=(9,)),
    Hostile("fills the pipe of reports", f"yes > $(echo {CONTROL}/*/done)", "timed_out", LATE),
    Hostile("an endless line to the reports", f"tr '\\0' x </dev/zero | cat > $(echo {CONTROL}/*/done)", "timed_out", LATE, timeout_s=2),
    Hostile("holds the pipes open", f"sleep {NAP} <>$(echo {CONTROL}/*/go) >$(echo {CONTROL}/*/done) & true", "succeeded", codes=(0, 1)),
    Hostile("poisons its state", f"echo 'exit 7' >$(echo {STATES_INSIDE}/*); kill -9 $$", "succeeded", codes=(137,)),
    Hostile("holds all processes", f"i=0; while [ $i -lt 100 ]; do sleep {NAP} & i=$((i+1)); done", "succeeded", codes=(0, 1, 2)),
]


MOST = "head -c 33000000 /dev/zero >most"
"""Writes nearly as much as fits on disk, so that little is left to what has half a per cent of a core."""

OWN = node_name("hostile")
"""The node of the sandbox that these tests share, from which each takes an environment of its own."""


@pytest.fixture(scope="module")
def sandbox(options: ContainerOptions, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSandbox]:
    """Give a sandbox of which nothing is left in the end."""
    base, before = tmp_path_factory.mktemp("hostile") / "box", threading.enumerate()
    box = ContainerSandbox(base, node=OWN, options=options, engine=DockerEngine())
    yield box
    box.close()
    assert until(lambda: not containers(OWN))
    assert list((base / "control").iterdir()) == []
    assert until(lambda: sandbox_threads(*before) == []), sandbox_threads(*before)


@pytest.fixture
def env(sandbox: ContainerSandbox) -> Iterator[ContainerEnvironment]:
    """Give an environment in which only an `echo` may have run before, and of which nothing is left in the end."""
    environment = sandbox.open(EnvironmentSpec(id="own"))
    container = environment.container
    yield environment
    environment.close()
    assert until(lambda: container.id not in containers(OWN))
    assert until(lambda: not processes_of(container.id) and not groups_of(container.id))
    assert until(lambda: not container.control.exists())


@pytest.fixture(scope="module")
def neighbour(sandbox: ContainerSandbox) -> ContainerEnvironment:
    """Give a second environment, which outlives all that is done in others."""
    return sandbox.open(EnvironmentSpec(id="neighbour"))


@pytest.mark.parametrize("hostile", HOSTILE, ids=[each.name for each in HOSTILE])
def test_a_hostile_command_hurts_itself_alone(
    sandbox: ContainerSandbox,
    env: ContainerEnvironment,
    neighbour: ContainerEnvironment,
    hostile: Hostile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.cpu.shell.session.SAVE_LIMIT_S", 1.0)
    # Given a session in which a command has run, and a neighbour at work
    printed(env, ":")
    with neighbour_at_work(neighbour, 1) as meanwhile:
        timeout_s = hostile.timeout_s if hostile.status == "timed_out" else 60.0
        outcome = admit(env, hostile.command, cores=(0,), timeout_s=timeout_s).wait()
        assert hostile.reason in outcome.reason, outcome
        assert outcome.status != "timed_out" or processes_with(NAP) == []
        if hostile.may_fail_for and outcome.cause == hostile.may_fail_for:
            assert (outcome.status, outcome.exit_code) == ("failed", None), outcome
        else:
            assert outcome.status == hostile.status, outcome
            assert outcome.exit_code in (hostile.codes or (None,)), outcome
        assert len(outcome.stdout) + len(outcome.stderr) <= (2 << 20) + 1024  # the last for what says how much is left out
        # And the environment takes more, once what was left running is ended
        after = env.start(ExecRequest(action_id="a2", command="echo alive", fence=True, timeout_s=60)).wait()
        assert (after.status, after.stdout) == ("succeeded", b"alive\n"), after
    assert meanwhile.is_untouched(), meanwhile.outcomes
    env.close()
    assert printed(sandbox.open(EnvironmentSpec(id="own")), "echo fresh") == "fresh\n"  # the next test goes on with it
    assert until(lambda: processes_with(NAP) == [])


def test_what_writes_on_in_the_background_is_ended_too(
    sandbox: ContainerSandbox, env: ContainerEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.cpu.docker.monitor.IDLE_CHECK_S", 0.1)
    run(env, f"{MOST}; (until test -e go; do sleep 0.05; done; head -c 30000000 /dev/zero >more) & true")
    env.write_file("go", b"")
    assert until(lambda: env not in sandbox.environments())
    with pytest.raises(EnvironmentGone, match="left running wrote more than the 32 MB"):
        run(env, ":")


def test_while_the_engine_does_not_remove_one_container_the_others_are_held_to_their_bound(
    sandbox: ContainerSandbox, env: ContainerEnvironment, neighbour: ContainerEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that does not answer when a container has to go for what a command has left running
    remove, is_asked, answers = DockerEngine.remove, threading.Event(), threading.Event()

    def stalls(engine: DockerEngine, container_id: str) -> None:
        if container_id == env.container.id:
            is_asked.set()
            answers.wait()
        remove(engine, container_id)

    monkeypatch.setattr(DockerEngine, "remove", stalls)
    monkeypatch.setattr("workers.cpu.docker.monitor.IDLE_CHECK_S", 0.1)
    try:
        run(env, f"{MOST}; (until test -e go; do sleep 0.05; done; while :; do cat /dev/zero >>more; done) >/dev/null 2>&1 &")
        env.write_file("go", b"")
        assert is_asked.wait(60)
        # When a command in another container writes too much, then it is ended for that, long before its time is over
        outcome = admit(neighbour, "while :; do cat /dev/zero >>big; done", cores=(0,), timeout_s=60.0).wait()
        printed(neighbour, "rm big")
        assert (outcome.status, outcome.cause) == ("failed", "disk_limit"), outcome
    finally:
        answers.set()
    # And the engine's answer ends what was to end
    assert until(lambda: env not in sandbox.environments())


def test_the_bound_on_disk_does_not_move_with_every_command(sandbox: ContainerSandbox, env: ContainerEnvironment) -> None:
    # Given an environment with a bound of 32 MB
    def fill(name: str) -> ExecOutcome:
        command = f"i=0; while :; do dd if=/dev/zero of={name}$i bs=1M count=1 2>&-; i=$((i+1)); done"
        return admit(env, command, cores=(0,)).wait()

    # When one command fills the disk, and the next one, which might have cleared up, goes on
    for name in "ab":
        outcome = fill(name)
        assert (outcome.status, outcome.cause) == ("failed", "disk_limit")
    assert until(lambda: env not in sandbox.environments())
    with pytest.raises(EnvironmentGone, match="on disk") as gone:
        fill("c")
    assert (gone.value.cause, gone.value.fault) == ("disk_limit", "program")


def test_control_files_take_no_disk_beyond_the_bound(env: ContainerEnvironment) -> None:
    for number in range(3):
        printed(env, ":", session=f"s{number}")
    outcome = admit(env, f"for f in {STATES_INSIDE}/*; do head -c 30000000 /dev/zero >$f; done; sleep 20", cores=(0,)).wait()
    assert outcome.status == "failed", outcome
    assert "to disk" in outcome.reason


def test_a_shell_killed_by_another_session_ends_its_command(env: ContainerEnvironment) -> None:
    with followed(env, "touch begun; sleep 20", session="other") as other:
        printed(env, "until test -f begun; do :; done")
        run(env, "kill -9 -1")
        outcome = other.outcome()
    # Then the command has ended with the code of its shell, and both sessions take more
    assert (outcome.status, outcome.exit_code) == ("succeeded", 137), outcome
    assert printed(env, "echo one", session="other") == "one\n"
    assert printed(env, "echo two") == "two\n"
