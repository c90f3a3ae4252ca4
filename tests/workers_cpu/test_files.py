"""Files go in and out of an environment, and no path leads out of it."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.errors import TangramError
from workers.cpu.errors import (
    EnvironmentGone,
    FileTooLarge,
    FileUnusable,
    NoSuchFile,
    PathIsDirectory,
    PathOutside,
)
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.files import Files
from workers.cpu.process.sandbox import ProcessSandbox

from .support import open_one, printed


def test_what_is_written_is_read_by_commands_and_back(env: ProcessEnvironment) -> None:
    # Given bytes written into a folder that does not exist
    env.write_file("a/b/c.bin", bytes(range(256)))
    # When a command copies them; then they come back the same
    printed(env, "cp a/b/c.bin copy")
    assert env.read_file("copy") == bytes(range(256))
    assert env.read_file(str(env.work_folder / "copy")) == bytes(range(256))


def test_writing_replaces_and_keeps_or_sets_the_mode(env: ProcessEnvironment) -> None:
    # Given a program written with a mode
    env.write_file("run.sh", b"#!/bin/sh\necho a long first version\n", mode=0o755)
    # When it is replaced without one; then it is still a program, and the shorter one
    env.write_file("run.sh", b"#!/bin/sh\necho two\n")
    assert printed(env, "./run.sh") == "two\n"


def test_files_pass_in_parts(env: ProcessEnvironment) -> None:
    # Given a file that is written in parts, one of them twice
    for offset, part in ((0, b"first "), (6, b"SECOND, cut"), (6, b"second "), (13, b"third")):
        env.write_file("parts", part, offset=offset)
    # Then it has each once, and can be read in parts
    assert env.read_file("parts") == b"first second third"
    assert [env.read_file("parts", at, 7) for at in (0, 7, 14, 21)] == [b"first s", b"econd t", b"hird", b""]
    # When a part is missing, the next one is refused
    with pytest.raises(FileUnusable, match="has 18 bytes"):
        env.write_file("parts", b"x", offset=19)


def test_temporary_files_can_be_read(env: ProcessEnvironment) -> None:
    # Given a file that a command made in its temporary folder; when it is read by its absolute path; then it is there
    path = printed(env, "f=$(mktemp); echo hi > $f; echo $f").strip()
    assert env.read_file(path) == b"hi\n"


@pytest.mark.parametrize(
    "path", ["../../../../etc/passwd", "/etc/passwd", "../../other", "link-out", "folder-out/passwd", "a/../../../x", "dangling"]
)
def test_paths_out_of_the_environment_are_refused(env: ProcessEnvironment, path: str) -> None:
    # Given links that lead out
    printed(env, "ln -s /etc/passwd link-out; ln -s /etc folder-out; ln -s /no/such/place dangling; mkdir a")
    # When such a path is read or written; then it is refused as both kinds of error
    with pytest.raises(PathOutside) as caught:
        env.read_file(path)
    assert isinstance(caught.value, PermissionError)
    assert isinstance(caught.value, TangramError)
    with pytest.raises(PathOutside):
        env.write_file(path, b"wrong")


def test_links_inside_the_environment_are_followed(env: ProcessEnvironment) -> None:
    # Given links to a file and to a folder inside
    printed(env, "mkdir d; echo hi > d/f; ln -s d/f to-file; ln -s $PWD/d to-folder")
    # When they are used; then they lead to it
    assert env.read_file("to-file") == env.read_file("to-folder/f") == env.read_file("d/../d/f") == b"hi\n"


def test_a_missing_file_says_so(env: ProcessEnvironment) -> None:
    # Given no such file; when it is read; then the error is a project error and a FileNotFoundError, with the path
    with pytest.raises(NoSuchFile, match=r"^no/such does not exist$") as caught:
        env.read_file("no/such")
    assert isinstance(caught.value, FileNotFoundError)


def test_folders_are_no_files(env: ProcessEnvironment) -> None:
    # Given a folder; when it is read or written as a file; then the error says so
    printed(env, "mkdir d")
    for path in ("d", ".", "..", "d/"):
        with pytest.raises(PathIsDirectory):
            env.read_file(path)
        with pytest.raises(PathIsDirectory):
            env.write_file(path, b"x")


def test_other_things_than_files_are_refused_without_waiting(env: ProcessEnvironment) -> None:
    # Given a FIFO with nobody at its other end, and a file where a folder is needed
    printed(env, "mkfifo pipe; touch file")
    # When they are used; then it is refused at once
    for path in ("pipe", "", "a\0b"):
        with pytest.raises(FileUnusable):
            env.read_file(path)
        with pytest.raises(FileUnusable):
            env.write_file(path, b"x")
    with pytest.raises(FileUnusable, match="file/below"):
        env.write_file("file/below", b"x")


def test_files_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    # Given a sandbox that passes 1000 bytes
    box = ProcessSandbox(tmp_path / "box", max_file_bytes=1000)
    try:
        small = open_one(box)
        small.write_file("fits", b"x" * 1000)
        assert len(small.read_file("fits")) == 1000
        printed(small, "head -c 1001 /dev/zero > too-large")
        # When one byte more is read or written; then it is refused
        with pytest.raises(FileTooLarge, match="1000 bytes"):
            small.read_file("too-large")
        with pytest.raises(FileTooLarge):
            small.write_file("new", b"x" * 1001)
    finally:
        box.close()


def test_a_closed_environment_has_no_files(env: ProcessEnvironment) -> None:
    # Given a closed environment; when a file is asked of it; then it is gone
    env.close()
    with pytest.raises(EnvironmentGone):
        env.read_file("x")
    with pytest.raises(EnvironmentGone):
        env.write_file("x", b"")


@given(parts=st.lists(st.sampled_from(["..", ".", "a", "b", "link", "up", "", "/", "~"]), min_size=1, max_size=8))
def test_no_path_ever_writes_outside(parts: list[str]) -> None:
    # Given a root with links that lead out and up, and any path
    with tempfile.TemporaryDirectory() as folder:
        outside, root = Path(folder, "outside"), Path(folder, "root")
        for made in (outside, root / "work" / "a"):
            made.mkdir(parents=True)
        os.symlink(outside, root / "work" / "link")
        os.symlink("../..", root / "work" / "up")
        # When it is written, or refused
        with contextlib.suppress(TangramError):
            Files(root, root / "work", 100).write("/".join(parts), b"x", None)
        # Then nothing outside the root has changed
        assert sorted(os.listdir(folder)) == ["outside", "root"]
        assert os.listdir(outside) == []


@pytest.mark.parametrize(
    ("number", "cause", "fault"),
    [
        (errno.ENOSPC, "sandbox_failed", "infrastructure"),
        (errno.EIO, "sandbox_failed", "infrastructure"),
        (errno.EACCES, "bad_input", "caller"),
    ],
)
def test_a_file_that_the_node_cannot_serve_is_not_the_callers_fault(
    env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch, number: int, cause: str, fault: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Files, "open_to_write", fail)
    with pytest.raises(FileUnusable, match=os.strerror(number)) as caught:
        env.write_file("a", b"text")
    assert (caught.value.cause, caught.value.fault) == (cause, fault)
