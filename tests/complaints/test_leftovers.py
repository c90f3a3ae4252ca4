"""An error in one step of a close skips no other step, and is made good: nothing is left of a rollout that failed.

Source: google/tunix #2312 (sandboxes outlived failed trajectories, since an error in `close()` skipped the release). The same for
containers is in `tests/containers/test_known_failures.py`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.workers_cpu.support import RUN, open_one, printed, processes_with, until
from workers.cpu import leftovers
from workers.cpu.disk_floor import DiskFloor
from workers.cpu.errors import DiskFull, ProcessesLeft
from workers.cpu.process import environment
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell.session import Session

NAP = f"321.7755{RUN}"


class Broken:
    """A step that fails so many times, then works."""

    def __init__(self, step: Callable[..., None], times: int, number: int) -> None:
        self.step, self.left, self.error = step, times, OSError(number, os.strerror(number))

    def __call__(self, *arguments: object) -> None:
        self.left -= 1
        if self.left >= 0:
            raise self.error
        self.step(*arguments)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is left tried again at once."""
    monkeypatch.setattr(leftovers.Leftovers.__init__, "__defaults__", (0.01,))


def nothing_is_left(base: Path) -> bool:
    return not processes_with(NAP) and not list((base / "environments").iterdir())


def test_an_error_while_one_session_ends_leaves_nothing_of_the_others(
    sandbox: ProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an environment with three sessions, each with a program that runs on
    env = open_one(sandbox)
    for name in ("first", "second", "third"):
        printed(env, f"sleep {NAP} & true", session=name)
    ending = Session.close
    monkeypatch.setattr(Session, "close", lambda self: (ending(self), broken())[0])
    broken = Broken(lambda: None, 1, errno.EIO)
    with pytest.raises(ProcessesLeft, match="of 1 sessions"):
        env.close()
    assert until(lambda: nothing_is_left(tmp_path / "box"))
    assert sandbox.environments() == ()


def test_files_that_cannot_be_removed_at_first_are_removed_later(
    sandbox: ProcessSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(environment.remove_tree, 3, errno.EBUSY)
    monkeypatch.setattr(environment, "remove_tree", broken)
    env = open_one(sandbox)
    printed(env, f"echo text > file; sleep {NAP} & true")
    env.close()
    # While they are there, another environment of the same id is a fresh one, and stays one
    again = open_one(sandbox)
    assert printed(again, "echo mine > own; ls") == "own\n"
    assert until(lambda: broken.left <= -1)
    assert printed(again, "cat own") == "mine\n"
    again.close()
    assert until(lambda: nothing_is_left(tmp_path / "box"))


def test_folders_however_deep_and_closed_are_removed(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    # Given folders within folders, deeper than a path or a recursion can be, some of which nobody may enter, and a link out of them
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    env = open_one(sandbox)
    os.symlink(outside, env.work_folder / "link")
    here = os.open(env.work_folder, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.mkdir("shut", 0o000, dir_fd=here)
    os.fchmod(here, 0o500)
    os.close(here)
    env.close()
    assert list((tmp_path / "box" / "environments").iterdir()) == []
    assert (outside / "kept").exists()


def test_what_can_never_be_removed_is_named_when_the_worker_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "remove_tree", Broken(environment.remove_tree, 1 << 30, errno.EROFS))
    box = ProcessSandbox(tmp_path / "box")
    for name in ("e1", "e2"):
        printed(open_one(box, name), f"sleep {NAP} & true")
    with pytest.raises(ProcessesLeft, match=r"the folder of environment e1 \(e1\.\w+\.closed\) could not be removed: .*Read-only"):
        box.close()
    assert not processes_with(NAP)


def test_a_disk_that_cannot_be_looked_at_opens_nothing_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    floor = DiskFloor(1, [folder])
    floor.check()
    folder.rmdir()
    with pytest.raises(DiskFull, match="cannot tell how much disk is free under .*: No such file") as caught:
        floor.check()
    assert caught.value.fault == "infrastructure"


def test_no_environment_is_opened_on_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    """Source: trajectoryRL #203 (a full disk made every score 0)."""
    disk = os.statvfs(tmp_path)
    floor_mb = disk.f_blocks * disk.f_frsize // (1 << 20) + 1
    box = ProcessSandbox(tmp_path / "box", disk_floor_mb=floor_mb)
    try:
        with pytest.raises(DiskFull, match=f"MiB of disk free, less than its TANGRAM_DISK_FLOOR_MB of {floor_mb}") as caught:
            open_one(box)
        assert "\n" not in str(caught.value) and box.environments() == ()
        # When there is room again, environments are opened
        box._disk_floor._floor_mb = 1
        assert printed(open_one(box), "echo up") == "up\n"
    finally:
        box.close()
