"""`memory_mb` of an environment holds where the worker may write control groups; how memory is measured and watched."""

from __future__ import annotations

import errno
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import cast

import pytest

from workers.cpu import control_files
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.errors import SandboxError
from workers.cpu.memory.allowance import Allowance
from workers.cpu.memory.controls import ControlsV2, Use
from workers.cpu.memory.watcher import Watcher
from workers.cpu.process import groups
from workers.cpu.process.background import GroupBackground
from workers.cpu.process.groups import LEAF, Groups, find_groups, make_room
from workers.cpu.process.members import Members
from workers.cpu.process.sandbox import ProcessSandbox
from workers.memory import MIB, usable_mb

from .conftest import EITHER, make
from .support import RUN, groups_like, printed, run, until

EATS_100_MB = "python3 -S -c 'print(len(bytearray(100 << 20)))'"


def bound_of(group: Path) -> Path:
    """Return the file with the most memory of a group."""
    return next(file for name in ("memory.max", "memory.limit_in_bytes") if (file := group / name).exists())


@pytest.fixture(params=EITHER)
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a sandbox of each kind, where it can hold environments to their memory."""
    with closing(make(tmp_path / "box", request.param)) as box:
        if not box.enforces_memory:
            pytest.skip("needs a control group for memory that the worker may write")
        yield box


def test_a_command_whose_shell_cannot_start_in_its_memory_ends_as_one_that_the_kernel_has_killed(bounded: ProcessSandbox) -> None:
    env = bounded.open(EnvironmentSpec(id=f"tiny-{RUN}", memory_mb=1))
    (folder,) = groups_like(f"tiny-{RUN}")
    bound_of(folder).write_text("8192")
    for session in ("one", "one", "two"):
        outcome = run(env, "echo here", session=session)
        assert (outcome.status, outcome.exit_code, outcome.cause, outcome.stdout) == ("succeeded", 137, "out_of_memory", b""), outcome
        assert "memory was full" in outcome.reason or "memory were full" in outcome.reason


def test_a_worker_that_cannot_bound_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "ROOT", "/proc/none")
    with closing(ProcessSandbox(tmp_path / "box", isolation="none")) as box:
        assert not box.enforces_memory
        assert printed(box.open(EnvironmentSpec(id="e", memory_mb=64)), EATS_100_MB) == f"{100 << 20}\n"


def test_an_environment_whose_memory_cannot_be_bounded_leaves_nothing(bounded: ProcessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, text: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    with monkeypatch.context() as patched:
        patched.setattr(groups.control_files, "write", refuse)
        with pytest.raises(SandboxError, match="the memory of environment odd-.* cannot be bounded"):
            bounded.open(EnvironmentSpec(id=f"odd-{RUN}"))
    assert not groups_like(f"odd-{RUN}")
    assert printed(bounded.open(EnvironmentSpec(id=f"odd-{RUN}")), "ls -A") == ""


def test_an_environment_that_names_no_memory_has_a_part_of_that_of_all(bounded: ProcessSandbox) -> None:
    env = bounded.open(EnvironmentSpec(id=f"plain-{RUN}"))
    (folder,) = groups_like(f"plain-{RUN}")
    own, of_all = (int(bound_of(group).read_text()) >> 20 for group in (folder, folder.parent))
    assert 2 * own <= of_all <= bounded.memory_mb < usable_mb()
    bound_of(folder).write_text(str(64 << 20))
    assert run(env, EATS_100_MB).cause == "out_of_memory"
    # And where memory is short on the machine, the kernel would end it before the worker
    assert printed(env, "cat /proc/self/oom_score_adj") == "1000\n"
    # And since its memory is fixed, nothing is there to pause it
    assert env.allowance is None and not list(Path(groups.ROOT).glob(f"freezer/**/*-plain-{RUN}"))


def test_a_program_that_ends_as_the_memory_of_all_environments_is_full_has_not_failed(bounded: ProcessSandbox) -> None:
    # Given environments that have less memory together than one of them may have
    env = bounded.open(EnvironmentSpec(id=f"innocent-{RUN}"))
    (folder,) = groups_like(f"innocent-{RUN}")
    bound_of(folder.parent).write_text(str(64 << 20))
    # When the kernel ends its program for that; then the infrastructure has failed
    outcome = run(env, EATS_100_MB)
    assert (outcome.status, outcome.exit_code, outcome.cause) == ("failed", None, "sandbox_failed"), outcome
    assert "the memory of the node was full" in outcome.reason


# -- version 2, by its files --------------------------------------------------------------------------------------------


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder of the worker's own group of version 2; groups that are made in it have the kernel's files."""

    def makedirs(path: str, exist_ok: bool = False) -> None:
        Path(path).mkdir(parents=True, exist_ok=exist_ok)
        for name in ("cpu.weight", "cpu.idle", "memory.max", "memory.swap.max", "cgroup.subtree_control", "cgroup.procs"):
            Path(path, name).touch()

    remove = os.rmdir

    def rmdir(path: str) -> None:
        for file in filter(Path.is_file, Path(path).iterdir()):
            file.unlink()
        remove(path)

    root = tmp_path / "cgroup"
    (root / "own").mkdir(parents=True)
    monkeypatch.setattr(groups, "ROOT", str(root))
    monkeypatch.setattr(groups.control_files, "paths_of", lambda pid: {"": "/own"})
    monkeypatch.setattr(os, "makedirs", makedirs)
    monkeypatch.setattr(os, "rmdir", rmdir)
    return root / "own"


def test_in_version_2_sessions_have_their_groups_in_that_of_the_environment(unified: Path) -> None:
    # Given a worker that may write a group of version 2; when an environment has 64 MB and a session
    found = find_groups("/base")
    found.bound_all(256)
    inside, memory = found.of_environment("e1", 64)
    inside.make(17)
    # Then the bound is on the environment without swap, and the session is in there with its own weight
    assert memory is not None
    folder = Path(memory.folder)
    assert folder.parent.parent == unified
    assert (folder.parent / "memory.max").read_text() == str(256 << 20)
    assert (folder.parent / "cgroup.subtree_control").read_text() == "+memory +cpu"
    assert (folder / "memory.max").read_text() == str(64 << 20)
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "cgroup.subtree_control").read_text() == "+cpu"
    assert inside.joined(17) == [f"{folder}/session-17"]
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert memory.oom_kills() == 2
    # And what the kernel ended counts for the environment only if its own memory was full
    assert (memory.was_full(1), memory.was_full(memory.watch())) == (True, False)
    found.remove()
    assert not list(unified.iterdir())


def test_in_version_2_an_environment_weighs_as_much_as_its_sessions(unified: Path) -> None:
    # Given an environment with two sessions
    found = find_groups("/base")
    found.bound_all(256)
    inside, memory = found.of_environment("e1", 64)
    assert memory is not None
    assert inside.cpu is not None
    background = GroupBackground((0,), inside.cpu, inside.around)
    first, second = Members(17), Members(18)
    for members in (first, second):
        inside.make(members.supervisor)

    own = Path(memory.folder)

    def weight() -> tuple[str, str]:
        alike = {tuple((folder / f"cpu.{name}").read_text() for name in ("idle", "weight")) for folder in (own, own.parent)}
        (both,) = alike  # the group of all environments weighs as much as they do together
        return both[0], both[1]

    # When one has two cores and the other one; then it counts for three
    background.weigh(first, 2)
    background.weigh(second, 1)
    assert weight() == ("0", "300")
    # When one goes to the background; then for those of the other, and when both do, for none
    background.send(first)
    assert weight()[0] == "0" and weight()[1].startswith("100")
    background.send(second)
    assert weight()[0].startswith("1")


def test_a_sandbox_of_memory_in_version_1_is_beside_the_worker(tmp_path: Path) -> None:
    found: Groups = find_groups(tmp_path)
    if found.memory is None or found.is_v2:
        pytest.skip("needs control groups of version 1")
    # It is within the worker's own, so that its bound holds too
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line).split(":")[2]
    assert found.memory.startswith(f"/sys/fs/cgroup/memory{own.rstrip('/')}/tangram-")


# -- version 2, by a kernel that has it -----------------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[Path]:
    """Give a group of version 2 below one that hands a controller down to it."""
    root = control_files.Mounts.of_this_process().unified
    if root is None or "hugetlb" not in (root / "cgroup.controllers").read_text().split():
        pytest.skip("needs control groups of version 2 with a controller that nobody uses")
    folder = root / f"tangram-test-{os.getpid()}"
    try:
        (root / "cgroup.subtree_control").write_text("+hugetlb")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make control groups: {error}")
    yield folder
    for group in (*filter(Path.is_dir, folder.iterdir()), folder):
        assert until(lambda group=group: control_files.is_removed(str(group)))  # type: ignore[misc]


@contextmanager
def trees(group: Path, count: int) -> Iterator[list[int]]:
    """Have `count` trees of two processes in a group; give the processes."""
    held = ["sh", "-c", "read -r line; sh -c 'echo $$; read -r line; exit' ; exit"]
    with ExitStack() as stack:
        found: list[int] = []
        for _ in range(count):
            top = stack.enter_context(subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert top.stdin is not None and top.stdout is not None
            stack.callback(top.stdin.close)
            (group / "cgroup.procs").write_text(str(top.pid))
            top.stdin.write(b"\n")
            top.stdin.flush()
            found += [top.pid, int(top.stdout.readline())]
        yield found


def test_in_version_2_a_worker_that_is_alone_in_its_group_makes_room_for_others_beside_it(own: Path) -> None:
    # Given a tree of processes in a group, which therefore cannot hand its controllers down
    with trees(own, 1) as processes:
        with pytest.raises(OSError, match="busy"):
            (own / "cgroup.subtree_control").write_text("+hugetlb")
        assert make_room(str(own), ("hugetlb", "absent")) == str(own)
        assert sorted(control_files.pids(str(own / LEAF))) == sorted(processes)
        assert (own / "cgroup.subtree_control").read_text().split() == ["hugetlb"]
        # And so it is for a worker that is started among them, and again
        assert make_room(str(own / LEAF), ("hugetlb",)) == make_room(str(own), ("hugetlb",)) == str(own)
        assert [path.name for path in own.iterdir() if path.is_dir()] == [LEAF]


def test_in_version_2_a_worker_beside_strangers_leaves_its_group_as_it_is(own: Path) -> None:
    with trees(own, 2) as processes:
        assert make_room(str(own), ("hugetlb",)) == str(own)
        assert sorted(control_files.pids(str(own))) == sorted(processes)
        assert not (own / "cgroup.subtree_control").read_text().strip() and not (own / LEAF).exists()


def test_a_large_file_that_is_removed_while_memory_is_measured_does_not_read_as_held(tmp_path: Path) -> None:
    usage, statistics = tmp_path / "memory.current", tmp_path / "memory.stat"
    usage.write_text(f"{100 * MIB}\n")
    os.mkfifo(statistics)

    def remove() -> None:
        with statistics.open("w") as file:  # open once the other side reads, so after the usage was
            usage.write_text(f"{20 * MIB}\n")
            file.write("active_file 0\ninactive_file 0\nfile_mapped 0\n")

    removing = threading.Thread(target=remove)
    removing.start()
    assert ControlsV2(str(tmp_path)).use() == Use(held=20 * MIB, cache=0)
    removing.join()


class Idle:
    """Says at each look that the next one has time."""

    environment = "e"

    def __init__(self) -> None:
        self.looks: queue.Queue[None] = queue.Queue()

    def look(self) -> float:
        self.looks.put(None)
        return 3600.0


def test_an_environment_that_need_not_be_looked_at_for_long_is_looked_at_once_an_action_begins() -> None:
    with closing(Watcher()) as watcher:
        idle = Idle()
        allowance = cast(Allowance, idle)
        watcher.watch(allowance)
        for patience_s in (0.02, 0.04, 0.0):
            idle.looks.get(timeout=60)
            watcher.look_within(allowance, patience_s)
        idle.looks.get(timeout=60)
