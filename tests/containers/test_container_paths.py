"""Files of a container, read and written from outside: never those of the host, and only what its user may."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers_cpu.support import admit, printed, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import FileTooLarge, FileUnusable, NoSuchFile, PathIsDirectory, SandboxError

from .conftest import NODE, emptied

MAX_FILE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def box(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSandbox]:
    """Give a sandbox that all tests share."""
    options = ContainerOptions(image=image, pull="never")
    base = tmp_path_factory.mktemp("paths") / "box"
    sandbox = ContainerSandbox(base, node=f"{NODE}-paths", options=options, max_file_bytes=MAX_FILE_BYTES)
    yield sandbox
    sandbox.close()


@pytest.fixture
def env(box: ContainerSandbox) -> ContainerEnvironment:
    """Give an environment that all tests share, in which nothing of the earlier ones runs or is in their folders."""
    return emptied(box.open(EnvironmentSpec(id="shared")))


@pytest.fixture(scope="module")
def strange(box: ContainerSandbox) -> ContainerEnvironment:
    """Give one for files of which a shell might not get rid."""
    return box.open(EnvironmentSpec(id="strange"))


def test_paths_are_those_of_the_container(env: ContainerEnvironment, tmp_path: Path) -> None:
    # Given a file of the host, and links of all kinds that could lead to it
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.chmod(secret, 0o644)
    up = "../" * 20
    printed(
        env, f"ln -s {secret} absolute; ln -s {up}{secret} relative; ln -s / root; ln -s /proc/1/root magic; ln -s loop loop; mkdir sub"
    )
    # When they are read or written; then nothing of the host is met
    for path in ("absolute", "relative", f"root{secret}", f"{up}{secret}", str(secret), f"sub/../{up}{secret}"):
        with pytest.raises(NoSuchFile):
            env.read_file(path)
    for path in (f"magic{secret}", f"/proc/1/root{secret}", f"/proc/self/root{secret}", "loop", "loop/x", "/proc/1/exe", "/proc/1/fd/0"):
        with pytest.raises((FileUnusable, NoSuchFile)):
            env.read_file(path)
    assert env.read_file(f"{up}etc/passwd") == env.read_file("root/etc/passwd") == env.read_file("/etc/passwd")
    assert env.read_file("/etc/passwd") != Path("/etc/passwd").read_bytes()
    env.write_file(f"{up}tmp/inside", b"inside")
    assert printed(env, "cat /tmp/inside") == "inside"


@pytest.mark.parametrize("path", ["/etc/shadow", "link"])
def test_what_the_user_may_not_read_is_not_read_from_outside(env: ContainerEnvironment, path: str) -> None:
    # Given a file for root and root's group alone, and a link to it; when it is read; then it is refused
    printed(env, "ln -s /etc/shadow link")
    with pytest.raises(FileUnusable, match="Permission denied"):
        env.read_file(path)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/bin/sh", "/etc/other", "/link", "link", "/proc/sys/kernel/core_pattern", "/run/tangram/alive"]
)
def test_what_the_user_may_not_write_is_not_written_from_outside(env: ContainerEnvironment, path: str) -> None:
    # Given files of root, and a link to one; when they are written; then that is refused
    printed(env, "ln -s /etc/passwd link")
    with pytest.raises(FileUnusable):
        env.write_file(path, b"x", 0o777)
    assert printed(env, "id -un") == "sandbox\n"


def test_control_files_are_not_written_from_outside_either(env: ContainerEnvironment) -> None:
    # Given a session; when its files are written through a link that a command has made; then that is refused
    printed(env, "for each in text go launch; do ln -s $(echo /run/tangram/*/$each) $each; done")
    for path in ("text", "go", "launch"):
        with pytest.raises(FileUnusable):
            env.write_file(path, b"exit 66")
    assert printed(env, "echo alive") == "alive\n"


def test_what_is_no_regular_file_is_refused_at_once(env: ContainerEnvironment) -> None:
    # Given FIFOs, one of which somebody reads, folders and devices
    printed(env, "mkfifo fifo read written; cat read >got & sleep 20 >written & mkdir folder; ln -s fifo link; ln -s folder into")
    # When they are read or written; then that is refused, and nothing waits
    for path in ("fifo", "link", "written", "/dev/zero", "/dev/null", "/dev/tty", "/dev/ptmx", "/dev/stdin"):
        with pytest.raises((FileUnusable, NoSuchFile)):
            env.read_file(path)
    for path in ("fifo", "read", "link", "/dev/null", "/dev/full"):
        with pytest.raises(FileUnusable):
            env.write_file(path, b"x")
    for path in ("folder", "into", "/", ".", "..", "folder/"):
        with pytest.raises(PathIsDirectory):
            env.read_file(path)
        with pytest.raises(PathIsDirectory):
            env.write_file(path, b"x")
    assert printed(env, "cat got") == ""


def test_a_huge_file_is_refused(env: ContainerEnvironment) -> None:
    # Given files of more than passes in one piece: a sparse one, one of the kernel's that does not say its size
    printed(env, "dd if=/dev/zero of=sparse bs=1 count=1 seek=1000000000 2>/dev/null")
    # When they are read; then they are refused
    for path in ("sparse", "/proc/1/pagemap"):
        with pytest.raises((FileTooLarge, FileUnusable)):
            env.read_file(path)
    with pytest.raises(FileTooLarge):
        env.write_file("big", bytes(MAX_FILE_BYTES + 1))


@pytest.mark.parametrize("path", ["a/" * 1500 + "x", "a" * 300, "a/" * 3000 + "x", "\udcff", "a\nb", "-rf"], ids=range(6))
def test_a_strange_path_is_a_file_or_one_of_our_errors(strange: ContainerEnvironment, path: str) -> None:
    # Given a path that is very deep, long or odd; when a file is written there
    try:
        strange.write_file(path, b"x")
        data = strange.read_file(path)
    except SandboxError:
        return
    # Then it is there, or was refused in our words
    assert data == b"x"


def test_a_file_belongs_to_the_user_inside(env: ContainerEnvironment) -> None:
    # Given nothing; when files are written, with folders above them
    env.write_file("a/b/plain", b"1")
    env.write_file("a/b/program", b"2", 0o755)
    # Then they and the folders are the user's, who can change them
    assert printed(env, "ls -nd a a/b a/b/* | awk '{print $1, $3, $4}'").splitlines() == [
        "drwxr-xr-x 1000 1000",
        "drwxr-xr-x 1000 1000",
        "-rw-r--r-- 1000 1000",
        "-rwxr-xr-x 1000 1000",
    ]
    printed(env, "echo more >>a/b/plain; rm -r a")


def test_a_folder_that_turns_into_a_link_meanwhile_leads_nowhere(env: ContainerEnvironment, tmp_path: Path) -> None:
    # Given a command that makes a name a folder and a link to a path of the host, by turns
    outside = tmp_path / "outside"
    outside.mkdir()
    os.chmod(outside, 0o777)
    flip = f"touch begun; while ! test -e stop; do for to in {outside} /etc; do rm -rf d; ln -s $to d; done; done 2>/dev/null; true"
    execution = admit(env, flip)
    thread = threading.Thread(target=execution.wait)
    thread.start()
    assert until(lambda: "begun" in printed(env, "ls", session="look"))
    # When files are written and read below it all the time
    results: list[bool] = []

    def write_and_read() -> bool:
        try:
            env.write_file(f"d/x{len(results)}", b"escaped")
            env.read_file(f"d/x{len(results)}")
        except SandboxError:
            results.append(False)
        else:
            results.append(True)
        return len(results) > 300 and not all(results)

    assert until(write_and_read)
    env.write_file("stop", b"")
    thread.join(60)
    # Then nothing has come to the host, or to what is root's inside
    assert list(outside.iterdir()) == []
    assert "x" not in [name[:1] for name in printed(env, "ls /etc").split()]


def test_a_worker_with_a_strict_umask_serves_all_the_same(tmp_path: Path, options: ContainerOptions) -> None:
    # Given a worker whose files are for itself alone
    before = os.umask(0o077)
    try:
        box = ContainerSandbox(tmp_path / "box", node=f"{NODE}-umask", options=replace(options, start_timeout_s=30.0))
        try:
            # When an environment works; then it works
            environment = box.open(EnvironmentSpec(id="e1"))
            assert printed(environment, "echo one") == "one\n"
            environment.write_file("f", b"two")
            assert printed(environment, "cat f") == "two"
        finally:
            box.close()
    finally:
        os.umask(before)
