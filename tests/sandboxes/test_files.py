"""Files go in and out of an environment, and no path leads out of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

import pytest

from tangram.errors import TangramError
from tests.workers_cpu.support import followed, printed, run, until
from workers.cpu.abstract import Environment
from workers.cpu.errors import DiskSpent, FileTooLarge, FileUnusable, NoSuchFile, PathIsDirectory, SandboxError

from .conftest import MAX_FILE_BYTES, Kind, own_root
from .test_output import exists


def test_what_is_written_is_read_by_commands_and_back(env: Environment) -> None:
    env.write_file("a/b/c.bin", bytes(range(256)))
    copies = printed(env, "cp a/b/c.bin copy; f=$(mktemp); cp copy $f; ln -s a/b/c.bin f; ln -s $PWD/a d; echo $PWD/copy $f").split()
    paths = ("copy", *copies, "f", "d/b/c.bin", "a/../a/b/c.bin")
    assert [env.read_file(path) for path in paths] == [bytes(range(256))] * len(paths)


def test_writing_replaces_and_keeps_or_sets_the_mode(env: Environment) -> None:
    env.write_file("run.sh", b"#!/bin/sh\necho a long first version\n", mode=0o755)
    env.write_file("run.sh", b"#!/bin/sh\necho two\n")
    assert printed(env, "./run.sh") == "two\n"


def test_files_pass_in_parts(env: Environment) -> None:
    for offset, part in ((0, b"first "), (6, b"SECOND, cut"), (6, b"second "), (13, b"third")):
        env.write_file("parts", part, offset=offset)
    assert env.read_file("parts") == b"first second third"
    assert [env.read_file("parts", at, 7) for at in (0, 7, 14, 21)] == [b"first s", b"econd t", b"hird", b""]
    with pytest.raises(FileUnusable, match="has 18 bytes"):
        env.write_file("parts", b"x", offset=19)


@own_root
def test_no_path_leads_to_the_host(env: Environment, tmp_path: Path) -> None:
    # Given a file of the host for everybody, links that could lead to it, and a link to nothing
    secret, up = tmp_path / "secret", "../" * 20
    secret.write_text("secret")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder != Path(tempfile.gettempdir()):
            os.chmod(folder, 0o755)
    printed(env, f"ln -s {secret} absolute; ln -s {up}{secret} relative; ln -s {tmp_path} folder; ln -s /no/such/place dangling; mkdir sub")
    paths = ("absolute", "relative", "folder/secret", f"{up}{secret}", str(secret), f"sub/../{up}{secret}", "dangling")
    for path in paths:
        with pytest.raises(NoSuchFile) as caught:
            env.read_file(path)
        assert isinstance(caught.value, FileNotFoundError) and isinstance(caught.value, TangramError)
    printed(env, "ln -s /proc/1/root magic; ln -s loop loop")
    for path in (f"magic{secret}", f"/proc/1/root{secret}", f"/proc/self/root{secret}", "loop", "loop/x", "/proc/1/exe", "/proc/1/fd/0"):
        with pytest.raises((FileUnusable, NoSuchFile)):
            env.read_file(path)
    # When it is written; then that is refused, or leads to a place of the environment's own
    for path in paths:
        with contextlib.suppress(SandboxError):
            env.write_file(path, b"wrong")
    assert secret.read_text() == "secret"
    assert list(tmp_path.iterdir()) == [secret]


def test_paths_mean_what_they_mean_to_a_command(kind: Kind, env: Environment) -> None:
    folder = f"/tmp/{secrets.token_hex(8)}"
    home = "/home/user" if kind.has_own_root else printed(env, "echo $HOME").strip()
    for number, path in enumerate((f"{folder}/a", "~/b/c", f"{home}/d/e", "f")):
        env.write_file(path, str(number).encode())
    for session in ("main", "other"):
        assert printed(env, f"cat {folder}/a ~/b/c $HOME/d/e f; rmdir {folder}/none 2>/dev/null; :", session) == "0123"
    assert env.read_file("/etc/passwd").decode() == printed(env, "cat /etc/passwd")
    for path in ("/proc/version", "/proc/sys/kernel/osrelease"):
        assert env.read_file(path).decode() == printed(env, f"cat {path}")
    printed(env, f"rm -r {folder}")


def test_a_file_call_may_what_a_command_may(env: Environment) -> None:
    # Given a file that nobody may read or write, but a user with every right
    printed(env, "echo text >shut; chmod 000 shut")
    if run(env, "cat shut").exit_code == 0:
        assert env.read_file("shut") == b"text\n"
        return
    with pytest.raises(FileUnusable, match="Permission denied"):
        env.read_file("shut")
    with pytest.raises(FileUnusable, match="Permission denied"):
        env.write_file("shut", b"x")


@own_root
def test_the_memory_of_processes_is_no_file(env: Environment) -> None:
    pid = int(printed(env, "sleep 300 & echo $!; ln -sf /proc proc"))
    for path in (f"/proc/{pid}/mem", f"/proc/{pid}/environ", f"proc/{pid}/mem", "/proc/1/mem"):
        with pytest.raises(FileUnusable):
            env.read_file(path)
        with pytest.raises(FileUnusable):
            env.write_file(path, b"x")


def test_a_missing_file_says_so_and_folders_are_no_files(env: Environment) -> None:
    with pytest.raises(NoSuchFile, match=r"^no/such does not exist$") as caught:
        env.read_file("no/such")
    assert isinstance(caught.value, FileNotFoundError)
    printed(env, "mkdir d; ln -s d into")
    for path in ("d", ".", "..", "d/", "into"):
        with pytest.raises(PathIsDirectory):
            env.read_file(path)
        with pytest.raises(PathIsDirectory):
            env.write_file(path, b"x")


@own_root
def test_shared_memory_that_a_program_has_filled_is_its_own_affair(env: Environment) -> None:
    run(env, "cat /dev/zero >/dev/shm/full")
    with pytest.raises(DiskSpent, match="No space left") as caught:
        env.write_file("/dev/shm/one", bytes(1 << 16))
    assert caught.value.fault == "program"


def test_other_things_than_files_are_refused_without_waiting(env: Environment) -> None:
    # Given FIFOs with nobody at their other end, with a reader, and with a writer, and a file where a folder is needed
    ends = "cat read >got & sleep 300 >written & until [ -e got ]; do sleep 0.01; done"
    printed(env, f"mkfifo pipe read written; {ends}; ln -s pipe link; touch file")
    for path in ("pipe", "link", "written", "", "a\0b"):
        with pytest.raises(FileUnusable):
            env.read_file(path)
    for path in ("pipe", "link", "read", "", "a\0b"):
        with pytest.raises(FileUnusable):
            env.write_file(path, b"x")
    with pytest.raises(FileUnusable, match="file/below"):
        env.write_file("file/below", b"x")
    assert printed(env, "cat got") == ""


def test_files_beyond_the_limit_are_refused(env: Environment) -> None:
    env.write_file("fits", bytes(MAX_FILE_BYTES))
    assert len(env.read_file("fits")) == MAX_FILE_BYTES
    printed(env, "cp fits larger; echo >>larger; dd if=/dev/zero of=sparse bs=1 count=1 seek=200000000 2>/dev/null")
    for path in ("larger", "sparse"):
        with pytest.raises(FileTooLarge, match=f"{MAX_FILE_BYTES} bytes"):
            env.read_file(path)
    with pytest.raises(FileTooLarge):
        env.write_file("new", bytes(MAX_FILE_BYTES + 1))


def test_a_strange_path_is_a_file_or_one_of_our_errors(env: Environment) -> None:
    for path in ("a/" * 2100 + "x", "a" * 300, "\udcff", "\ud800", "a\nb", "-rf"):
        with contextlib.suppress(SandboxError):
            env.write_file(path, b"x")
            assert env.read_file(path) == b"x"


@own_root
def test_a_folder_that_turns_into_a_link_meanwhile_leads_nowhere(env: Environment, tmp_path: Path) -> None:
    # Given a command that makes a name a folder, and a link to a path of the host, by turns
    outside = tmp_path / "outside"
    outside.mkdir()
    os.chmod(outside, 0o777)
    flip = f"touch begun; while ! test -e stop; do for to in {outside} /etc; do rm -rf d; ln -s $to d; done; done 2>/dev/null; true"
    results: list[bool] = []

    def write_and_read() -> bool:
        for _ in range(50):
            try:
                env.write_file(f"d/x{len(results)}", b"escaped")
                env.read_file(f"d/x{len(results)}")
            except SandboxError:
                results.append(False)
            else:
                results.append(True)
        return len(results) > 300 and not all(results)

    # When files are written and read below it all the time
    with followed(env, flip) as one:
        assert until(lambda: exists(env, "begun")) and until(write_and_read)
        env.write_file("stop", b"")
        one.outcome()
    # Then nothing has come to the host, or to what is root's inside
    assert list(outside.iterdir()) == []
    assert "x" not in [name[:1] for name in [*os.listdir("/etc"), *printed(env, "ls /etc").split()] if name[1:].isdigit()]
