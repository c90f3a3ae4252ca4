"""What only a container has that could lead out of it: its user, process 1, control groups, folders, files from outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.sandboxes.conftest import container_options
from tests.workers_cpu.support import admit, printed, run, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone, FileTooLarge, FileUnusable, NoSuchFile

from .conftest import node_name
from .images import make_busybox

pytestmark = pytest.mark.real

TRACES = """
import ctypes, os
libc = ctypes.CDLL(None)
if libc.ptrace(16, 1, None, None) == 0:  # PTRACE_ATTACH
    os.waitpid(1, 0x40000000)
    libc.ptrace(8, 1, None, None)  # PTRACE_KILL
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSandbox]:
    base = tmp_path_factory.mktemp("escape") / "box"
    with closing(ContainerSandbox(base, node=node_name("escape"), options=container_options())) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def shared(box: ContainerSandbox) -> ContainerEnvironment:
    return box.open(EnvironmentSpec(id="shared"))


@pytest.fixture
def env(box: ContainerSandbox) -> ContainerEnvironment:
    """Give a second environment, a new one where a test has ended it."""
    return box.open(EnvironmentSpec(id="other"))


def test_tracing_process_1_reaches_nothing_but_the_own_container(
    box: ContainerSandbox, env: ContainerEnvironment, shared: ContainerEnvironment
) -> None:
    env.write_file("traces.py", TRACES.encode())
    admit(env, "python3 -S traces.py", timeout_s=2).wait()
    # When that has been tried; then its environment works, or is off the books, and the neighbour works
    alive = b""
    with suppress(EnvironmentGone):
        alive = run(env, "echo alive").stdout
    # It may have ended a moment after the command
    if env.container.has_ended():
        assert until(lambda: env not in box.environments())
    else:
        assert alive == b"alive\n"
    assert printed(shared, "echo alive") == "alive\n"


def test_control_groups_cannot_be_written(shared: ContainerEnvironment) -> None:
    script = """
        for name in cgroup.procs tasks cpu.cfs_quota_us cpu.max cpuset.cpus memory.limit_in_bytes memory.max pids.max devices.allow \
            freezer.state release_agent notify_on_release cgroup.subtree_control; do
            for file in $(find /sys/fs/cgroup -name $name 2>/dev/null); do (echo 1 >$file) 2>/dev/null && echo $file; done
        done
        for folder in $(find /sys/fs/cgroup -maxdepth 3 -type d); do mkdir $folder/own 2>/dev/null && echo $folder; done; true
    """
    assert printed(shared, script) == ""


def test_no_control_folder_but_the_own_is_there_and_that_cannot_be_written(env: ContainerEnvironment) -> None:
    assert printed(env, "ls /run/tangram").split() == sorted(path.name for path in env.container.control.iterdir())
    assert printed(env, f"test -e {env.container.control.parent} || echo none") == "none\n"
    said = printed(env, "touch /run/tangram/x 2>&1; touch /run/tangram-states/x 2>&1; true")
    assert "Read-only file system" in said.splitlines()[0]
    assert "Permission denied" in said.splitlines()[1]


def test_process_1_leads_to_the_own_files_alone(shared: ContainerEnvironment) -> None:
    assert printed(shared, "ls /proc/1/root/") == printed(shared, "ls /")
    assert printed(shared, "ls -di /proc/1/root/bin | awk '{print $1}'") == printed(shared, "ls -di /bin | awk '{print $1}'")
    assert "busybox" in printed(shared, "ls /proc/1/cwd/bin")


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


def test_the_home_is_the_same_whatever_folders_an_image_has(box: ContainerSandbox, shared: ContainerEnvironment) -> None:
    make_busybox(name := "tangram-test-homes:1", programs={"home/user/own": Path(__file__)}, volumes=["/work"])
    other = box.open(EnvironmentSpec(id="homes", image=name))
    assert printed(other, "pwd; ls; touch new; echo text >/work/file; ls") == "/home/user\nown\nnew\nown\n"
    printed(shared, "echo text >/work/there; rm ~/there; test -L /work")
