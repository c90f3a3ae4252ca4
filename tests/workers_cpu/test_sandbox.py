"""Opening and closing: nothing is left behind, and many at once work."""

from __future__ import annotations

import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from glob import glob
from pathlib import Path

import psutil
import pytest

from tangram.errors import InvalidAction
from tests.freezing import freeze
from workers.cpu.abstract import EnvironmentSpec, ExecRequest, Holding
from workers.cpu.errors import EnvironmentExists, EnvironmentGone, ImageUnsupported, SandboxInUse, SessionUnavailable
from workers.cpu.process import tree
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.groups import find_groups
from workers.cpu.process.sandbox import ProcessSandbox

from .support import RUN, admit, open_one, printed, processes_with, run, until, worker_to_be_killed


def descriptors() -> int:
    gc.collect()  # what earlier tests left must not be closed between two counts
    return len(os.listdir("/proc/self/fd"))


def test_environments_are_found_until_they_are_closed(sandbox: ProcessSandbox) -> None:
    # Given two environments
    first, second = open_one(sandbox, "e1"), open_one(sandbox, "e2")
    assert sandbox.get("e1") is first
    assert sandbox.environments() == (first, second)
    # When one is closed; then it is gone, and the other is not
    first.close()
    with pytest.raises(EnvironmentGone, match="e1"):
        sandbox.get("e1")
    assert sandbox.environments() == (second,)


def test_opening_twice_gives_the_same_environment_if_it_is_the_same(sandbox: ProcessSandbox) -> None:
    # Given an open environment; when it is opened again; then it is that one, or an error if it should differ
    assert open_one(sandbox) is open_one(sandbox)
    with pytest.raises(EnvironmentExists):
        sandbox.open(EnvironmentSpec(id="e1", memory_mb=100))


def test_an_id_can_be_used_again_and_starts_empty(sandbox: ProcessSandbox) -> None:
    # Given an environment with a file that was closed; when its id is opened again; then it is empty
    printed(open_one(sandbox), "touch file")
    sandbox.get("e1").close()
    assert printed(open_one(sandbox), "ls") == ""


def test_an_id_whose_environment_is_being_closed_can_be_opened(sandbox: ProcessSandbox) -> None:
    # Given an environment that takes nothing more, but is not gone yet
    closing = open_one(sandbox)
    printed(closing, "touch file")
    closing.hang_up()
    # When its id is opened again; then that is another one, once its room is free
    assert printed(open_one(sandbox), "ls") == ""


def test_images_are_refused(sandbox: ProcessSandbox) -> None:
    # Given a specification with an image; when it is opened; then the error says why not
    with pytest.raises(ImageUnsupported, match="python:3"):
        sandbox.open(EnvironmentSpec(id="e1", image="python:3"))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "-a", "a b", "a\0", "é", "x" * 129, ".hidden"])
def test_ids_that_are_no_safe_file_name_are_refused(name: str) -> None:
    # Given such an id; when a specification or a session is made of it; then it is refused
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
    # Given a request with one wrong value; when it is made; then the error names the field
    good: dict[str, object] = {"action_id": "a", "command": "true"}
    with pytest.raises(InvalidAction, match=f"^{field}: "):
        ExecRequest(**{**good, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("cores", "background"), [((-1,), False), ((True,), False), ((0,), True)])
def test_grants_that_make_no_sense_are_refused(cores: tuple[int, ...], background: bool) -> None:
    # Given a grant with a wrong core; when it is made; then the error names the field
    with pytest.raises(InvalidAction, match="^cores: "):
        Holding(cores, background)


def test_closing_ends_every_process_and_removes_every_file(sandbox: ProcessSandbox) -> None:
    # Given an environment with background processes of all sorts, two sessions and files without permissions
    env = open_one(sandbox)
    printed(env, f"(setsid sh -c 'trap \"\" TERM; sleep 315.53125{RUN}; sleep 315.53125{RUN}' >/dev/null 2>&1 &) ; sleep 315.53125{RUN} &")
    printed(env, f"nohup sleep 315.53125{RUN} >/dev/null 2>&1 &", session="two")
    printed(env, "mkdir -p locked/inner; touch locked/inner/file; chmod 0 locked/inner locked; chmod 500 .")
    assert until(lambda: len(processes_with(f"315.53125{RUN}")) >= 3)
    root = env.work_folder.parent
    # When it is closed, twice
    env.close()
    env.close()
    # Then no process and no file of it is left, and it takes no command
    assert not processes_with(f"315.53125{RUN}")
    assert not processes_with(str(root))
    assert not root.exists()
    with pytest.raises(EnvironmentGone):
        admit(env, "true")


def test_closing_cancels_running_and_waiting_commands(sandbox: ProcessSandbox) -> None:
    # Given one running command and one behind it
    env = open_one(sandbox)
    executions = [admit(env, f"sleep 315.5625{RUN}"), admit(env, "true")]
    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(execution.wait) for execution in executions]
        assert until(lambda: bool(processes_with(f"315.5625{RUN}")))
        # When the environment is closed
        env.close()
        # Then both are cancelled for that reason
        for outcome in outcomes:
            assert (outcome.result(60).status, outcome.result().reason) == ("cancelled", "the environment was closed")
    assert not processes_with(f"315.5625{RUN}")


def test_a_closed_sandbox_opens_nothing(tmp_path: Path) -> None:
    # Given a closed sandbox; when something is asked of it; then it is gone
    box = ProcessSandbox(tmp_path / "box")
    open_one(box)
    box.close()
    box.close()
    assert box.environments() == ()
    with pytest.raises(EnvironmentGone):
        open_one(box)


def test_a_base_folder_belongs_to_one_sandbox(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    # Given a living sandbox; when another wants its folder; then it is refused
    with pytest.raises(SandboxInUse):
        ProcessSandbox(tmp_path / "box")


def test_an_unknown_shell_is_refused_at_once(tmp_path: Path) -> None:
    # Given no such program; when it is to be the shell; then the error says so
    with pytest.raises(SessionUnavailable, match="no-such-shell"):
        ProcessSandbox(tmp_path / "box", shell="no-such-shell")


def test_a_sandbox_waits_for_what_ends_the_commands_of_a_killed_worker(tmp_path: Path) -> None:
    # Given a killed worker, and processes that would end its commands but do not get to it
    with worker_to_be_killed(tmp_path / "box", f"315.59375{RUN}") as worker:
        below = {process.pid for process in tree.descendants(worker.pid)}
        cleanup = below.intersection(processes_with("workers.cpu.process.fork_server"))
        for pid in cleanup:
            freeze(pid)
        worker.kill()
        worker.wait()
    # When a sandbox takes over the folder
    with ThreadPoolExecutor() as threads:
        taking = threads.submit(ProcessSandbox, tmp_path / "box")
        try:
            early, _ = wait([taking], timeout=0.5)
        finally:
            for pid in cleanup:
                os.kill(pid, signal.SIGCONT)
        box = taking.result()
    # Then it does so only once they are done
    assert not early
    assert not processes_with(f"315.59375{RUN}")
    box.close()


def test_the_supervisors_of_a_killed_worker_remove_their_groups(tmp_path: Path) -> None:
    # Given a worker with a session, and where its sandbox makes groups for sessions
    groups = find_groups(os.path.realpath(tmp_path / "box"))
    prefixes = [path for path in (groups.pids, groups.cpu, groups.memory) if path is not None]
    with worker_to_be_killed(tmp_path / "box", f"315.609375{RUN}") as worker:
        # When it is killed; then the next one finds no group of a session
        worker.kill()
    assert until(lambda: not processes_with(str(tmp_path)))
    assert until(lambda: not any(glob(f"{prefix}-*") for prefix in prefixes))
    ProcessSandbox(tmp_path / "box").close()


def test_a_killed_worker_leaves_no_process_and_its_files_go_with_the_next_sandbox(tmp_path: Path) -> None:
    # Given a worker with a background process and a running command
    with worker_to_be_killed(tmp_path / "box", f"315.671875{RUN}") as worker:
        # When it is killed
        worker.kill()
    # Then all its processes end, and the next sandbox of that folder starts empty
    assert until(lambda: not processes_with(f"315.671875{RUN}") and not processes_with(str(tmp_path)))
    box = ProcessSandbox(tmp_path / "box")
    assert printed(open_one(box), "ls") == ""
    box.close()


def test_fifty_threads_in_fifty_environments(sandbox: ProcessSandbox) -> None:
    # Given fifty environments
    environments = [open_one(sandbox, f"e{number}") for number in range(50)]

    def work(number: int) -> list[tuple[int | None, bytes]]:
        env = environments[number]
        run(env, f"x={number}; echo {number} > file")
        outcomes = [run(env, "echo $x $(cat file) $((n = n + 1))") for _ in range(4)]
        outcomes.append(run(env, f"exit {number}"))
        return [(outcome.exit_code, outcome.stdout) for outcome in outcomes]

    # When as many threads use them at the same time
    with ThreadPoolExecutor(50) as pool:
        results = list(pool.map(work, range(50)))
    # Then each had its own
    for number, result in enumerate(results):
        assert result == [*((0, f"{number} {number} {turn}\n".encode()) for turn in (1, 2, 3, 4)), (number, b"")]


def test_nothing_leaks(tmp_path: Path) -> None:
    # Given a worker that has used a sandbox once, so that all is imported
    def use() -> None:
        box = ProcessSandbox(tmp_path / "box")
        env = open_one(box)
        run(env, f"sleep 315.65625{RUN} & echo hi")
        run(env, "yes & :")
        run(env, "exit 3")
        admit(env, f"sleep 315.65625{RUN}", timeout_s=0.05).wait()
        run(env, "kill -9 $PPID; sleep 1")
        printed(env, "echo on")
        killed = admit(env, "true")
        killed.kill("never")
        killed.wait()
        box.close()

    use()
    before, threads, children = descriptors(), threading.active_count(), set(psutil.Process().children())
    # When it uses some more
    for _ in range(3):
        use()
    # Then there are no more descriptors and threads than before, and no child, not even a zombie; threads of earlier tests may have ended
    assert descriptors() <= before and threading.active_count() <= threads
    assert set(psutil.Process().children()) <= children
    assert not processes_with(f"315.65625{RUN}")


def test_an_idle_environment_leaves_no_zombies_behind_its_commands(env: ProcessEnvironment) -> None:
    # Given commands whose processes are orphaned and end; when all have ended
    shell = int(printed(env, "(setsid true &) ; (true &) ; sh -c 'true & true &' ; echo $$"))
    supervisor = psutil.Process(shell).parent()
    assert supervisor is not None
    # Then supervisor and shell have reaped them
    assert until(lambda: [child.pid for child in supervisor.children(recursive=True)] == [shell])


def test_open_environments_hold_nothing_before_their_first_command(sandbox: ProcessSandbox) -> None:
    # Given two hundred environments that have run nothing; when they are opened
    children = set(psutil.Process().children())
    before, environments = descriptors(), list[ProcessEnvironment]()
    environments.extend(open_one(sandbox, f"e{number}") for number in range(200))
    # Then no process and no descriptor was spent on them
    assert descriptors() <= before
    assert set(psutil.Process().children()) <= children
    # And one in which a command has run costs one descriptor
    assert run(environments[0], "true").exit_code == 0
    with_first = descriptors()
    assert run(environments[1], "true").exit_code == 0
    assert descriptors() <= with_first + 1
