"""Files of a container, read and written from outside: never those of the host, and only what its user may."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers_cpu.support import printed
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import FileTooLarge, FileUnusable, NoSuchFile

from .images import make_busybox

pytestmark = pytest.mark.real


def test_from_outside_files_are_written_as_the_user_inside_would_and_devices_are_none(env: ContainerEnvironment) -> None:
    # Given links that a command has made to a file of root, and to the control files of its session
    printed(env, "ln -s /etc/passwd link; for each in text go launch; do ln -s $(echo /run/tangram/*/$each) $each; done")
    for path in ("link", "/etc/other", "/proc/sys/kernel/core_pattern", "/run/tangram/alive", "text", "go", "launch", "/dev/null"):
        with pytest.raises(FileUnusable):
            env.write_file(path, b"exit 66", 0o777)
    assert printed(env, "id -un") == "sandbox\n"
    for path in ("/dev/zero", "/dev/null", "/dev/tty", "/dev/ptmx", "/dev/stdin", "/proc/1/pagemap"):
        with pytest.raises((FileUnusable, FileTooLarge, NoSuchFile)):
            env.read_file(path)
    env.write_file("a/b/plain", b"1")
    env.write_file("a/b/program", b"2", 0o755)
    assert printed(env, "ls -nd a a/b a/b/* | awk '{print $1, $3, $4}'").splitlines() == [
        "drwxr-xr-x 1000 1000",
        "drwxr-xr-x 1000 1000",
        "-rw-r--r-- 1000 1000",
        "-rwxr-xr-x 1000 1000",
    ]
    printed(env, "echo more >>a/b/plain; rm -r a")


def test_the_home_is_the_same_whatever_folders_an_image_has(sandbox: ContainerSandbox, env: ContainerEnvironment) -> None:
    make_busybox(name := "tangram-test-homes:1", programs={"home/user/own": Path(__file__)}, volumes=["/work"])
    other = sandbox.open(EnvironmentSpec(id="other", image=name))
    assert printed(other, "pwd; ls; touch new; echo text >/work/file; ls") == "/home/user\nown\nnew\nown\n"
    printed(env, "echo text >/work/there; rm ~/there; test -L /work")
