"""Environments and their commands outlive a worker that is killed: the next one in its folder goes on with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, suppress
from fnmatch import fnmatch
from io import FileIO
from itertools import count
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from docker import APIClient

from app.local.kept_environments import end_kept
from tests.containers.conftest import node_name
from tests.containers.support import containers, docker, engine, processes_of
from tests.workers_cpu.support import RUN, Asked, Worker, printed, processes_with, sleepers, until, worker_to_be_killed
from tests.workers_cpu.test_adoption import KEEP_S, asked, ids, kill, leaves
from workers.cpu.abstract import EnvironmentSpec, Sandbox
from workers.cpu.docker.backend import SHELL, START, ContainerBackend
from workers.cpu.docker.cgroups.abstract import SessionGroup
from workers.cpu.docker.cgroups.choice import ControlGroups
from workers.cpu.docker.engine import SNAPSHOT_LABEL
from workers.cpu.docker.images import SNAPSHOTS
from workers.cpu.docker.init import STATES
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.process import tree
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell.dialect import FRESH
from workers.cpu.shell.run_types import both_ends, waits_in

from .conftest import Boxes, Kind, container_options, numbers, params

pytestmark = pytest.mark.timeout(300)


class Workers:
    """Workers of a kind that follow one another in the folder `base`, as one node."""

    def __init__(self, kind: Kind, base: Path) -> None:
        self.kind, self.base, self.node = kind, base, node_name(f"adoption-{next(numbers)}")

    def make(self, base: Path, **more: Any) -> Sandbox:
        given = {"keep_s": KEEP_S, **more}
        if self.kind.is_container:
            return ContainerSandbox(base, **{"node": self.node, "options": container_options(), **given})
        return ProcessSandbox(base, **{"isolation": self.kind.isolation, **given})

    def to_be_killed(self, *commands: tuple[str, str, str], **more: Any) -> AbstractContextManager[Worker]:
        return worker_to_be_killed(self.base, *commands, make=self.make, **more)

    def next(self, **more: Any) -> closing[Any]:
        return closing(self.make(self.base, **more))

    def home(self, environment: str) -> Path:
        """Return the home of an environment, as this process sees it."""
        if not self.kind.is_container:
            return self.base / "environments" / environment / "work"
        (container,) = containers(self.node)
        return Path(f"/proc/{engine().inspect_container(container)['State']['Pid']}/root/home/user")

    def left(self) -> list[Any]:
        """Return what is left of environments."""
        folders = [path for name in ("environments", "control") if (folder := self.base / name).exists() for path in folder.iterdir()]
        return folders + (containers(self.node) if self.kind.is_container else processes_with(str(self.base)))


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "container"))


@pytest.fixture
def workers(kind: Kind, boxes: Boxes, tmp_path: Path) -> Iterator[Workers]:
    """Give workers of a kind that works here; what they have left ends with the test."""
    boxes(kind.name)
    yield Workers(kind, tmp_path / "environments" / "box")
    end_kept(tmp_path)


@pytest.mark.parametrize("place", params("process", "view", "bubblewrap", "container"), indirect=True)
def test_idle_environments_go_on_with_files_sessions_and_what_they_left_running(workers: Workers) -> None:
    # Given a worker with an environment that has a shell with variables, one that has ended, and a program that prints on and on
    sets = "cd /tmp && export SET=1; unexported=2; greet() { echo hello $1; }; umask 027"
    prints = f"cd ~; echo text > file; (while :; do echo on; sleep 0.02; done) & echo $! > prints; sleep 317.25{RUN} & cd /tmp"
    commands = [("e", "main", sets), ("e", "main", prints), ("e", "ended", "cd /tmp; export LEFT=3"), ("e", "ended", "exit 4")]
    # When it is killed, and so is the next one, which has used it
    with workers.to_be_killed(*commands, ("other", "main", "true")) as worker:
        kill(worker)
    with workers.to_be_killed(("e", "main", "unexported=$unexported+"), ("other", "last", "true")) as worker:
        kill(worker)
    with workers.next() as third:
        assert ids(third) == ["e", "other"]
        env = third.get("e")
        assert printed(env, "pwd; echo $SET $unexported; greet you; umask") == "/tmp\n1 2+\nhello you\n0027\n"
        assert printed(env, "kill -0 $(cat ~/prints) && echo prints on") == "prints on\n"
        assert printed(env, "pwd; echo $LEFT", session="ended") == "/tmp\n3\n"
        assert env.read_file("file") == b"text\n"
        assert printed(third.open(EnvironmentSpec(id="new")), "echo fine") == "fine\n"
        env.close()
        assert not processes_with(f"317.25{RUN}") and ids(third) == ["other", "new"]
    assert until(lambda: not workers.left())


WAITS = "until [ -e ~/go ]; do sleep 0.02; done"
RUNNING = (
    asked(
        "prints",
        f"echo before; echo wrong >&2; echo once >> ~/prints; {WAITS}; head -c 300000 /dev/zero | tr '\\0' x; echo after; (exit 5)",
    ),
    asked("leaves", "touch ~/leaves; until [ -e ~/gone ]; do sleep 0.02; done; exit 3"),
    asked("ends", "touch ~/ends; echo done; cd /tmp; kept=1"),
    asked("program", "touch ~/program; echo $X; exec sleep 0.2; exit 7", interpreter=("sh", "-c"), variables={"X": "2"}),
    asked("late", f"touch ~/late; trap '' TERM; sleep 317.1875{RUN}", timeout_s=0.5),
    asked("endless", f"touch ~/endless; sleep 317.1875{RUN}"),
    asked("much", f"head -c 5000000 /dev/zero | tr '\\0' y; echo end; touch ~/much; {WAITS}", output_limit_bytes=1000),
)


@pytest.mark.parametrize("place", params("process", "view", "bubblewrap", "container"), indirect=True)
def test_commands_go_on_with_their_output_limits_and_processes_and_each_ends_once(workers: Workers) -> None:
    # Given a worker with a server that a command has left, and commands that run; when it is killed, and so are the next two, of which the
    # first one goes on with nothing yet
    first = ("e", "endless", f"sleep 317.3125{RUN} & echo $! > server")
    with workers.to_be_killed(first, side_by_side=RUNNING) as worker:
        assert worker.is_idle()
        home = workers.home("e")
        assert until(lambda: all((home / request.action_id).exists() for request in RUNNING))
        worker.kill()
    (home / "gone").touch()
    with workers.to_be_killed(("e", "main", "true")) as worker:
        kill(worker)
    with workers.to_be_killed(("e", "main", "true"), goes_on_with=RUNNING) as worker:
        kill(worker)
    # Then the last one has the outcome of each
    with workers.next() as third:
        env = third.get("e")
        assert sorted(third.left_messages) == sorted(request.message for request in RUNNING)
        executions = {request.action_id: env.start(request) for request in RUNNING}
        with ThreadPoolExecutor(len(executions)) as threads:
            outcomes = {name: threads.submit(execution.wait) for name, execution in executions.items()}
            env.write_file("go", b"")
            executions["endless"].kill("no longer wanted")
            ended = {name: future.result(60) for name, future in outcomes.items()}
        assert {name: (one.status, one.exit_code) for name, one in ended.items()} == {
            "prints": ("succeeded", 5),
            "leaves": ("succeeded", 3),
            "ends": ("succeeded", 0),
            "program": ("succeeded", 0),
            "late": ("timed_out", None),
            "endless": ("cancelled", None),
            "much": ("succeeded", 0),
        }
        assert ended["prints"].stdout == b"before\n" + b"x" * 300_000 + b"after\n" and ended["prints"].stderr == b"wrong\n"
        assert (ended["ends"].stdout, ended["program"].stdout) == (b"done\n", b"2\n")
        assert (
            ended["much"].truncated
            and ended["much"].stdout.startswith(b"y" * 500 + b"\n[4999004 bytes")
            and len(ended["much"].stdout) < 1100
        )
        # And what earlier commands have left runs on, sessions go on, and no end is told again
        assert printed(env, "kill -0 $(cat ~/server) && echo serves", session="endless") == "serves\n"
        assert printed(env, "pwd; echo $kept", session="ends") == "/tmp\n1\n"
        assert not processes_with(f"317.1875{RUN}") and printed(env, "cat ~/prints", session="prints") == "once\n"
        for execution in executions.values():
            execution.note_told()
    with workers.next() as fourth:
        assert not fourth.left_messages


@pytest.mark.real
def test_containers_of_which_nobody_takes_charge_end_and_the_others_go_on(workers: Workers) -> None:
    # Given a worker with two environments; when it is killed, and somebody ends the container of one
    with workers.to_be_killed(("ends", "main", "true"), ("stays", "main", leaves(f"318.5{RUN}"))) as worker:
        kill(worker)
    (sleeper,) = sleepers(f"318.5{RUN}")
    (stays,) = [each for each in containers(workers.node) if sleeper in processes_of(each)]
    (ends,) = {*containers(workers.node)} - {stays}
    docker("kill", ends)
    docker("commit", "--change", f"LABEL {SNAPSHOT_LABEL}={workers.node}", stays, snapshot := f"{SNAPSHOTS}:{workers.node}")
    # Then the next one has the other, and snapshots
    with workers.next() as box:
        assert ids(box) == ["stays"] and sleepers(f"318.5{RUN}") == [sleeper] and docker("images", "--quiet", snapshot)
    # And one that makes containers in another way, or comes too late, has none
    for keep_s, more in ((KEEP_S, {"options": container_options(read_only=True)}), (0.5, {})):
        with workers.to_be_killed(("e", "main", leaves(f"318.5{RUN}")), keep_s=keep_s) as worker:
            kill(worker)
        assert keep_s == KEEP_S or until(lambda: not containers(workers.node))
        with workers.next(**more) as box:
            assert not ids(box) and until(lambda: not processes_with(f"318.5{RUN}") and not workers.left())
    assert not docker("images", "--quiet", snapshot)


@pytest.mark.real
def test_what_was_paused_for_memory_goes_on_under_a_worker_that_books_limits(workers: Workers) -> None:
    # Given a container that its worker holds to less than its limit, and has paused
    with workers.to_be_killed(("e", "main", "kept=1")) as worker:
        kill(worker)
    (container,) = containers(workers.node)
    controls = ControlGroups(sorted(os.sched_getaffinity(0)))(engine().inspect_container(container)["State"]["Pid"]).controls()
    controls.bound(64 << 20)
    controls.freeze()
    with workers.next(memory="fixed") as box:
        found = printed(box.get("e"), "echo $kept; head -c 90000000 /dev/zero | tail -c 90000000 | wc -c")
    assert found == "1\n90000000\n"


STEPS: dict[str, tuple[Any, str, bool]] = {
    "to have a state": (os, "fchmod", False),
    "asked for": (APIClient, "exec_start", False),
    "started": (ContainerBackend, "_take_in", False),
    "being noted": (os, "fchmod", False),
    "known, waiting": (ContainerBackend, "_watch", False),
    "known, not yet waiting": (ContainerBackend, "_watch", False),
    "in its group, waiting": (SessionGroup, "add", True),
    "in its group, not yet waiting": (SessionGroup, "add", True),
    "let go on": (ContainerBackend, "_put", False),
}
"""How far a shell is: what its start calls in which class, and whether that has been done."""

WRITTEN = {"to have a state": f"/{STATES}/*{FRESH}", "being noted": f"/{SHELL}{FRESH}"}
"""The file that is written meanwhile."""


def kill_as_shell_starts(workers: Workers, step: str, *before: Asked) -> str:
    """Have a worker with a session be killed as it starts a shell for another one. Return what the engine calls one that is asked for.

    What runs `before` has a shell for each command.
    """
    kind, name, is_done = STEPS[step]
    kinds: list[Any] = [kind] if kind in (os, APIClient) else kind.__subclasses__() or [kind]
    calls, starts = count(), count()
    asked_for = workers.base.with_name("asked for")

    def killing(method: Callable[..., None]) -> Callable[..., None]:
        def killed(*given: Any, **more: Any) -> None:
            is_counted = kind is not os or fnmatch(os.readlink(f"/proc/self/fd/{given[0]}"), f"*{WRITTEN[step]}")
            is_last = is_counted and next(calls) > len(before)
            if is_done or not is_last:
                method(*given, **more)
            if is_last:
                assert not step.endswith(", waiting") or until(lambda: is_waiting(given[1]))
                asked_for.write_text(str(given[-1]))
                os.kill(os.getpid(), signal.SIGKILL)

        return killed

    def stopping(method: Callable[..., None]) -> Callable[..., None]:
        def stopped(backend: ContainerBackend, start: str) -> None:
            if next(starts) > len(before):
                os.kill(backend._shell, signal.SIGSTOP)
            method(backend, start)

        return stopped

    def make(base: Path, **more: Any) -> Sandbox:
        for each in kinds:  # in the worker's own process
            setattr(each, name, killing(getattr(each, name)))
        if step.endswith("not yet waiting"):
            ContainerBackend._take_in = stopping(ContainerBackend._take_in)  # type: ignore[method-assign]
        return workers.make(base, **more)

    with worker_to_be_killed(workers.base, ("e", "main", "kept=1"), *before, ("e", "late", "echo no"), make=make) as worker:
        worker.process.join(60)
        assert worker.process.exitcode == -signal.SIGKILL
    return asked_for.read_text()


def is_waiting(shell: int) -> bool:
    """Return whether a shell has opened the FIFO by which it is let go on."""
    with suppress(FileNotFoundError):  # It closes others meanwhile.
        return any(START in os.readlink(file) for file in Path(f"/proc/{shell}/fd").iterdir())
    return False


def has_report(done: Path) -> bool:
    """Return whether a shell has reported what nobody has read."""
    with closing(FileIO(both_ends(str(done)))) as fifo:
        return waits_in(fifo.fileno()) > 0


def shells(workers: Workers) -> list[bytes]:
    """Return the command lines of the shells that wait to be let go on, or for commands."""
    (container,) = containers(workers.node)
    lines = [tree.command_line(pid) for pid in processes_of(container)]
    return [line for line in lines if b"/launch" in line or b"/go" in line]


def check_sessions(box: Sandbox, workers: Workers) -> None:
    """Check that each command runs in one shell, and that none waits to be let go on."""
    env = box.get("e")
    assert printed(env, "echo $kept") == "1\n"
    assert printed(env, "echo once >> ~/late; cat ~/late", session="late") == "once\n"
    assert [b"/go" in line for line in shells(workers)] == [True, True]


@pytest.mark.real
@pytest.mark.parametrize("step", STEPS)
def test_a_worker_that_is_killed_while_a_shell_starts_leaves_no_second_one(workers: Workers, step: str) -> None:
    # Given a worker that is killed as it starts a shell: one that waits then to be let go on never is
    kill_as_shell_starts(workers, step)
    assert not step.endswith(", waiting") or until(lambda: len(shells(workers)) == 1)
    with workers.next() as box:
        check_sessions(box, workers)


@pytest.mark.real
@pytest.mark.parametrize("is_beside", [False, True], ids=["before the next one", "beside the next one"])
def test_a_shell_that_the_engine_starts_once_its_worker_was_killed_ends_at_once(
    workers: Workers, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = kill_as_shell_starts(workers, "asked for", ("e", "late", "exit 3"))
    take_in = ContainerBackend._take_in

    def start_late() -> None:
        engine().exec_start(asked_for, detach=True)
        assert until(lambda: not engine().exec_inspect(asked_for)["Running"])

    def beside(backend: ContainerBackend, start: str) -> None:
        start_late()
        take_in(backend, start)

    with workers.next() as box:
        if is_beside:
            monkeypatch.setattr(ContainerBackend, "_take_in", beside)
        else:
            start_late()
        check_sessions(box, workers)


@pytest.mark.real
def test_a_shell_that_has_reported_to_nobody_lets_no_command_begin_before_the_next_one_is_ready(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that was killed when it had let a shell go on, which then reports
    kill_as_shell_starts(workers, "let go on")
    assert until(lambda: any(map(has_report, workers.base.glob("control/*/*/done"))))
    take_in, starts = ContainerBackend._take_in, count()

    def slowly(backend: ContainerBackend, start: str) -> None:
        os.kill(backend._shell, signal.SIGSTOP)
        take_in(backend, start)
        next(starts)
        Timer(0.5, os.kill, (backend._shell, signal.SIGCONT)).start()

    # Then its report is not taken for that of another shell, which starts slowly
    monkeypatch.setattr(ContainerBackend, "_take_in", slowly)
    with workers.next() as box:
        check_sessions(box, workers)
    assert next(starts) == 1


@pytest.mark.real
def test_the_command_of_a_paused_container_ends_in_the_next_worker_and_the_container_where_none_comes(workers: Workers) -> None:
    with closing(workers.make(workers.base.with_name("trial"), memory="elastic")) as trial:
        if trial.memory_problem:
            pytest.skip(trial.memory_problem)
    grows = ("e", "main", f"python3 -S -c 'held = bytearray(200 << 20); import time; time.sleep(318.75{RUN})'")

    def is_paused(**more: Any) -> None:
        with workers.to_be_killed(grows, grant_mb=80, memory="elastic", **more) as worker:
            worker.await_pause()
            worker.kill()

    # Given a worker that is killed while the environment of a command is paused; whether the next one pauses environments, too, or none
    for memory in ("elastic", "fixed"):
        is_paused()
        with workers.next(memory=memory) as box:
            # Then nobody can go on with the command, so it has ended, and the environment stands
            assert ids(box) == ["e"] and not processes_with(f"318.75{RUN}")
            assert printed(box.get("e"), "echo fine") == "fine\n"
    # And the environment ends where the next one comes too late
    is_paused(keep_s=0.5)
    assert until(lambda: not containers(workers.node))
