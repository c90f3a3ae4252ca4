"""What is written to control groups of version 2, in a folder made to look like one; needs no engine and no kernel of that kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.cpu.control_files import Mounts
from workers.cpu.docker.cgroups import v2

FILES = ("cgroup.procs", "cgroup.subtree_control", "cgroup.freeze", "cpu.idle", "cpu.max", "cpu.weight", "cpuset.cpus")


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> v2.ContainerGroupV2:
    """Give the group of a container whose process 1 is 7 and that is alone in it."""
    make: Callable[[str], None] = os.mkdir

    def mkdir(path: str) -> None:
        make(path)
        # The kernel fills each new group with its control files.
        for name in FILES:
            (Path(path) / name).touch()

    monkeypatch.setattr(v2, "os", SimpleNamespace(mkdir=mkdir))
    monkeypatch.setattr(v2, "paths_of", lambda pid: {"": f"/system.slice/docker-{pid}.scope"})
    folder = tmp_path / "system.slice" / "docker-7.scope"
    folder.parent.mkdir()
    mkdir(str(folder))
    (folder / "cgroup.procs").write_text("7\n")
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n")
    return v2.ContainerGroupV2(Mounts(tmp_path, {}), 7, (0, 1, 2, 3))


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "system.slice" / "docker-7.scope"


def test_the_container_init_moves_to_a_leaf_before_controllers_are_handed_down(container: v2.ContainerGroupV2, tmp_path: Path) -> None:
    assert (folder_of(tmp_path) / "init" / "cgroup.procs").read_text() == "7"
    assert (folder_of(tmp_path) / "cgroup.subtree_control").read_text() == "+cpu +cpuset"


def test_a_session_begins_parked_and_is_parked_again_after_a_grant(container: v2.ContainerGroupV2, tmp_path: Path) -> None:
    session = container.session("session-1")
    quota, cores = (folder_of(tmp_path) / "session-1" / name for name in ("cpu.max", "cpuset.cpus"))
    assert quota.read_text() == "5000 1000000"
    said = []
    for grant in (lambda: session.grant((1, 2, 3)), lambda: session.grant((2,)), session.park):
        quota.write_text("")
        cores.write_text("")
        grant()
        said.append((cores.read_text(), quota.read_text()))
    # Then each is written, and nothing that stands already
    assert said == [("1-3", "max 1000000"), ("2", ""), ("", "5000 1000000")]


def test_processes_of_a_session_are_told_and_stopped_as_a_whole(container: v2.ContainerGroupV2, tmp_path: Path) -> None:
    session = container.session("session-1")
    session.add(41)
    folder = folder_of(tmp_path) / "session-1"
    assert (folder / "cgroup.procs").read_text() == "41"
    assert session.processes() == [41]
    assert container.processes().count(41) == 1
    session.freeze()
    stopped = (folder / "cgroup.freeze").read_text()
    session.thaw()
    assert (stopped, (folder / "cgroup.freeze").read_text()) == ("1", "0")


def test_use_and_kills_for_want_of_memory_are_read(container: v2.ContainerGroupV2, tmp_path: Path) -> None:
    session = container.session("session-1")
    (folder_of(tmp_path) / "session-1" / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n")
    assert session.cpu_s() == 1.5
    assert container.oom_kills() == 2
    (folder_of(tmp_path) / "memory.events").unlink()
    with pytest.raises(OSError, match="memory.events"):
        container.oom_kills()


def test_a_container_counts_for_the_cores_of_its_sessions_and_is_in_the_background_while_none_has_any(
    container: v2.ContainerGroupV2, tmp_path: Path
) -> None:
    names = ("session-1", "session-2")
    first, second = map(container.session, names)
    # Each step, then the flags and the weights of the container and of both sessions, and the cores and the quota of the second.
    # In the background the flag holds a session, not the weight: it has the cores of the others, or all where nobody has any.
    steps = (
        (lambda: first.grant((0, 1, 2)), ["0", "0", ""], ["300", "300", ""], "", "5000 1000000"),
        (second.send_to_background, ["0", "0", "1"], ["300", "300", ""], "0-2", "max 1000000"),
        (first.send_to_background, ["1", "1", "1"], ["300", "300", ""], "0-3", "max 1000000"),
        (lambda: second.grant((3,)), ["0", "1", "0"], ["100", "300", "100"], "3", "max 1000000"),
        (lambda: first.grant((1, 2)), ["0", "0", "0"], ["300", "200", "100"], "3", "max 1000000"),
        (first.send_to_background, ["0", "1", "0"], ["100", "200", "100"], "3", "max 1000000"),
        (second.park, ["1", "1", "0"], ["100", "200", "100"], "3", "5000 1000000"),
        (lambda: first.grant((0, 1)), ["0", "0", "0"], ["200", "200", "100"], "3", "5000 1000000"),
    )
    for number, (step, flags, weights, cores, quota) in enumerate(steps):
        step()
        found = {file: [(folder_of(tmp_path) / name / file).read_text() for name in ("", *names)] for file in FILES}
        assert (found["cpu.idle"], found["cpu.weight"]) == (flags, weights), number
        assert found["cpuset.cpus"][2].startswith(cores) and found["cpu.max"][2].startswith(quota), number


def test_the_next_worker_takes_over_what_an_earlier_one_has_made(
    container: v2.ContainerGroupV2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a session with cores, in a container whose init has moved
    container.session("session-1").grant((1, 2))
    monkeypatch.setattr(v2, "paths_of", lambda pid: {"": f"/system.slice/docker-{pid}.scope/init"})
    quota, cores = (folder_of(tmp_path) / "session-1" / name for name in ("cpu.max", "cpuset.cpus"))
    cores.write_text("")
    # When another worker has the container; then the session has what that grants, and the init stays where it is
    v2.ContainerGroupV2(Mounts(tmp_path, {}), 7, (0, 1, 2, 3)).session("session-1").grant((1, 2))
    assert quota.read_text().startswith("max 1000000") and cores.read_text() == "1-2"
    assert not (folder_of(tmp_path) / "init" / "init").exists()
