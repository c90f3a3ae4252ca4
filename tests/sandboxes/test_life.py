"""Environments are opened, found and closed: nothing is left behind, and two who open the same get the same."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tangram.errors import InvalidAction
from tests.containers.conftest import node_name
from tests.workers_cpu.conftest import make
from tests.workers_cpu.support import RUN, admit, printed, processes_with, run, until
from workers.cpu.abstract import Environment, EnvironmentSpec, ExecRequest, Holding, Sandbox
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.dop import dop_variables
from workers.cpu.errors import EnvironmentExists, EnvironmentGone, SandboxInUse, SnapshotUnsupported
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.process.users import find_users

from .conftest import Kind, container_options, params


def made(kind: Kind, base: Path) -> Sandbox:
    if kind.isolation is None:
        return ContainerSandbox(base, node=node_name("life"), options=container_options())
    return make(base, kind.isolation)


@pytest.fixture
def alone(kind: Kind, tmp_path: Path) -> Iterator[Sandbox]:
    """Give a sandbox of the test's own, in the folder `box`."""
    box = made(kind, tmp_path / "box")
    yield box
    box.close()


def of(name: str, memory_mb: int | None = None, image: str | None = None) -> EnvironmentSpec:
    return EnvironmentSpec(id=name, memory_mb=memory_mb, image=image)


def test_environments_are_found_until_they_are_closed(alone: Sandbox) -> None:
    first, second = alone.open(of("e1")), alone.open(of("e2"))
    assert alone.get("e1") is first
    assert alone.environments() == (first, second)
    printed(first, "touch file $TMPDIR/temporary")
    assert printed(second, "ls; ls $TMPDIR") == ""
    assert alone.open(of("e1")) is first
    with pytest.raises(EnvironmentExists):
        alone.open(of("e1", 100))
    first.close()
    with pytest.raises(EnvironmentGone, match="e1"):
        alone.get("e1")
    assert alone.environments() == (second,)
    assert printed(alone.open(of("e1")), "ls; ls $TMPDIR") == ""


def test_an_id_whose_environment_is_being_closed_can_be_opened(alone: Sandbox) -> None:
    closing = alone.open(of("e1"))
    printed(closing, "touch file")
    thread = threading.Thread(target=closing.close)
    thread.start()
    assert until(lambda: closing.is_closed)  # type: ignore[attr-defined]
    assert printed(alone.open(of("e1")), "ls") == ""
    thread.join(60)


def at_once(*calls: Callable[[], Environment]) -> list[Environment | Exception]:
    """Make calls at the same time and return what each came to."""
    barrier = threading.Barrier(len(calls))

    def make(call: Callable[[], Environment]) -> Environment | Exception:
        barrier.wait()
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(make, calls))


def test_two_who_open_an_id_at_once_get_the_same_or_one_is_refused(alone: Sandbox) -> None:
    found = at_once(*[lambda: alone.open(of("same"))] * 4)
    assert all(each is found[0] for each in found), found
    found = at_once(lambda: alone.open(of("differs", 32)), lambda: alone.open(of("differs", 48)))
    assert [type(each) for each in found if isinstance(each, Exception)] == [EnvironmentExists]
    assert len(alone.environments()) == 2


def test_closing_ends_every_process_and_command_and_removes_every_file(alone: Sandbox, tmp_path: Path) -> None:
    # Given an environment with background processes of all sorts, two sessions and files without permissions
    before, nap = set((tmp_path / "box").rglob("*")), f"sleep 315.53125{RUN}"
    env = alone.open(of("e1"))
    printed(env, f"(setsid sh -c 'trap \"\" TERM; {nap}; {nap}' >/dev/null 2>&1 &) ; {nap} &")
    printed(env, f"setsid {nap} >/dev/null 2>&1 &", session="two")
    printed(env, "mkdir -p locked/inner; touch locked/inner/file; chmod 0 locked/inner locked; chmod 500 .")
    executions = [admit(env, f"{nap}; touch never"), admit(env, "true")]
    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(executions[0].wait)]
        assert until(lambda: len(processes_with(nap.replace(" ", "\0"))) == 4)
        outcomes.append(pool.submit(executions[1].wait))
        env.close()
        env.close()
        for outcome in outcomes:
            assert (outcome.result(60).status, outcome.result().reason) == ("cancelled", "the environment was closed")
    assert not processes_with(f"315.53125{RUN}")
    assert until(lambda: set((tmp_path / "box").rglob("*")) == before)
    for use in (lambda: admit(env, "true"), lambda: env.read_file("x"), lambda: env.write_file("x", b"")):
        with pytest.raises(EnvironmentGone):
            use()


def test_a_folder_belongs_to_one_sandbox_and_a_closed_one_opens_nothing(kind: Kind, alone: Sandbox, tmp_path: Path) -> None:
    alone.open(of("e1"))
    with pytest.raises(SandboxInUse):
        made(kind, tmp_path / "box")
    alone.close()
    alone.close()
    assert alone.environments() == ()
    with pytest.raises(EnvironmentGone):
        alone.open(of("e1"))
    with contextlib.closing(made(kind, tmp_path / "box")) as next_one:
        assert next_one.environments() == ()


def descriptors() -> int:
    gc.collect()  # what earlier tests left must not be closed between two counts
    return len(os.listdir("/proc/self/fd"))


def test_nothing_leaks(kind: Kind, tmp_path: Path) -> None:
    # Given a worker that has used a sandbox once, so that all is imported
    def use() -> None:
        with contextlib.closing(made(kind, tmp_path / "box")) as box, ThreadPoolExecutor(3) as threads:

            def use_one(name: str) -> None:
                env = box.open(of(name))
                for command in (f"sleep 315.65625{RUN} & echo hi", "yes & :", "exit 3", "kill -9 $$", "kill -9 $PPID; sleep 0.1"):
                    run(env, command)
                admit(env, f"sleep 315.65625{RUN}", timeout_s=0.05).wait()
                killed = admit(env, "true")
                killed.kill("never")
                killed.wait()
                # One is left to the end of the sandbox
                if name != "e1":
                    env.close()

            list(threads.map(use_one, ("e1", "e2", "e3")))

    use()
    before, threads, children = descriptors(), threading.active_count(), set(psutil.Process().children())
    use()
    # Then there are no more descriptors and threads than before, and no child, not even a zombie; threads of earlier tests may have ended
    assert descriptors() <= before and threading.active_count() <= threads
    assert set(psutil.Process().children()) <= children
    assert not processes_with(f"315.65625{RUN}")


@pytest.mark.parametrize("place", params("bubblewrap", "view", "container"))
def test_the_umask_of_a_worker_keeps_no_user_out(kind: Kind, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with contextlib.closing(made(kind, tmp_path / "box")) as box:
            # Then the worker chooses users as with any other, who read what environments show of /etc
            assert not isinstance(box, ProcessSandbox) or (box._users is None) == (find_users() is None)
            env = box.open(of("e1"))
            printed(env, "cat /etc/hostname /etc/hosts /etc/passwd")
            assert printed(env, "find /etc -type d ! -executable; ls -d /tmp/. ~/.") == "/home/user/.\n/tmp/.\n"
            env.write_file("f", b"text")
            assert printed(env, "cat f") == "text"
    finally:
        os.umask(before)


def test_an_environment_of_a_snapshot_has_the_same_files(kind: Kind, sandbox: Sandbox, env: Environment) -> None:
    if not kind.has_snapshots:
        with pytest.raises(SnapshotUnsupported):
            sandbox.snapshot(env.spec.id)
        return
    printed(env, "mkdir -p a/b; echo one >a/b/c; chmod 741 a/b/c; ln -s c a/b/l; echo two >/tmp/t; sleep 20 & true")
    reference = sandbox.snapshot(env.spec.id)
    try:
        printed(env, "echo later >a/b/c; rm /tmp/t")
        copy = sandbox.open(EnvironmentSpec(id="copy", image=reference))
        assert printed(copy, "cat a/b/l /tmp/t; ls -l a/b/c | cut -c1-10; id -u; pwd") == "one\ntwo\n-rwxr----x\n1000\n/home/user\n"
        assert printed(copy, "ls -nd ~ a a/b | awk '{print $3}' | sort -u") == "1000\n"
        assert "sleep" not in printed(copy, "ps")
        printed(copy, "echo new >a/b/c")
        assert printed(env, "cat a/b/c") == "later\n"
        copy.close()
    finally:
        subprocess.run(["docker", "rmi", reference], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "-a", "a b", "a\0", "é", "x" * 129, ".hidden"])
def test_ids_that_are_no_safe_file_name_are_refused(name: str) -> None:
    with pytest.raises(InvalidAction, match="environment"):
        EnvironmentSpec(id=name)
    with pytest.raises(InvalidAction, match="session"):
        ExecRequest(action_id="a", command="true", session=name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", "a\0b"),
        ("timeout_s", 0.0),
        ("timeout_s", -1.0),
        ("timeout_s", float("nan")),
        ("output_timeout_s", 0.0),
        ("output_limit_bytes", -1),
        ("variables", {"A-B": "x"}),
        ("variables", {"A": "\0"}),
    ],
)
def test_requests_that_make_no_sense_are_refused(field: str, value: object) -> None:
    good: dict[str, object] = {"action_id": "a", "command": "true"}
    with pytest.raises(InvalidAction, match=f"^{field}: "):
        ExecRequest(**{**good, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("cores", "background"), [((-1,), False), ((True,), False), ((0,), True)])
def test_grants_that_make_no_sense_are_refused(cores: tuple[int, ...], background: bool) -> None:
    with pytest.raises(InvalidAction, match="^cores: "):
        Holding(cores, background)
    with pytest.raises(ValueError, match="^dop must be at least 1"):
        dop_variables(0)
