"""Programs that look for a way out of their container find none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.workers_cpu.support import admit, printed, run, until
from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone

from .conftest import NODE

REFUSED = {errno.EPERM, errno.EACCES, errno.ENOSYS}
MAX_FILE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def box(probe_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSandbox]:
    """Give a sandbox that all tests share."""
    options = ContainerOptions(image=probe_image, pull="never")
    base = tmp_path_factory.mktemp("escape") / "box"
    sandbox = ContainerSandbox(base, node=f"{NODE}-escape", options=options, max_file_bytes=MAX_FILE_BYTES)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def shared(box: ContainerSandbox) -> ContainerEnvironment:
    """Give an environment for tests that change nothing."""
    return box.open(EnvironmentSpec(id="shared"))


@pytest.fixture
def env(box: ContainerSandbox) -> ContainerEnvironment:
    """Give a second environment, a new one where a test has ended it."""
    return box.open(EnvironmentSpec(id="other"))


# -- who it is -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "Uid: 1000 1000 1000 1000",
        "Gid: 1000 1000 1000 1000",
        "Groups: 1000",
    ],
)
def test_a_command_is_nobody(shared: ContainerEnvironment, line: str) -> None:
    # Given a container; when a command, and process 1, look at themselves; then they have no rights at all
    for process in ("self", "1"):
        status = printed(shared, f"cat /proc/{process}/status").replace("\t", " ").splitlines()
        assert line in [" ".join(each.split()) for each in status], status


def test_a_setuid_program_gains_nothing(shared: ContainerEnvironment) -> None:
    # Given a program that belongs to root and is to run as root
    assert printed(shared, "ls -ln /bin/rootprobe | cut -c1-10") == "-rwsr-xr-x\n"
    # When it runs; then it is not root
    assert printed(shared, "rootprobe euid") == f"{errno.EPERM}\n"
    assert printed(shared, "rootprobe setuid") == f"{errno.EPERM}\n"


CALLS = (
    "add_key keyctl bpf unshare-user unshare-mount unshare-net clone-user setns-mount setns-net mount umount fsopen move_mount pivot_root "
    "chroot reboot swapon init_module finit_module delete_module kexec_load clock_settime acct sethostname iopl ioperm syslog "
    "perf_event_open userfaultfd open_by_handle_at fanotify_init quotactl mknod setuid setgid setgroups nice realtime socket-raw "
    "socket-packet"
)


@pytest.mark.parametrize("call", CALLS.split())
def test_a_system_call_that_is_for_root_is_refused(shared: ContainerEnvironment, call: str) -> None:
    # Given a program that makes a call which only root, or nobody inside, may make; when it runs
    said = printed(shared, f"probe {call}").strip()
    # Then it is refused
    assert said != "ok"
    assert int(said) in REFUSED, os.strerror(int(said))


@pytest.mark.parametrize("call", ["socket-vsock", "io_uring"])
@pytest.mark.xfail(reason="filters of older engines let it pass")
def test_a_way_round_the_network_or_the_filter_is_refused(shared: ContainerEnvironment, call: str) -> None:
    # Given a call by which a virtual machine's host could be reached, or others made unseen; when it is made; then it is refused
    assert printed(shared, f"probe {call}") != "ok\n"


def test_tracing_process_1_reaches_nothing_but_the_own_container(
    box: ContainerSandbox, env: ContainerEnvironment, shared: ContainerEnvironment
) -> None:
    # Given a command that traces process 1, which is of the same user, to end it
    admit(env, "probe trace-1", timeout_s=2).wait()
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


# -- what it can reach -----------------------------------------------------------------------------------------------


def test_control_groups_cannot_be_written(shared: ContainerEnvironment) -> None:
    # Given the control files of all groups that a command can see
    # When it tries to write each that could set it free, and to make a group; then none can be
    script = """
        for name in cgroup.procs tasks cpu.cfs_quota_us cpu.max cpuset.cpus memory.limit_in_bytes memory.max pids.max devices.allow \
            release_agent notify_on_release cgroup.subtree_control; do
            for file in $(find /sys/fs/cgroup -name $name 2>/dev/null); do (echo 1 >$file) 2>/dev/null && echo $file; done
        done
        for folder in $(find /sys/fs/cgroup -maxdepth 3 -type d); do mkdir $folder/own 2>/dev/null && echo $folder; done; true
    """
    assert printed(shared, script) == ""


def test_no_control_folder_but_the_own_is_there(env: ContainerEnvironment) -> None:
    assert printed(env, "ls /run/tangram").split() == sorted(os.listdir(env.container.control))
    assert printed(env, f"test -e {env.container.control.parent} || echo none") == "none\n"


def test_process_1_leads_to_the_own_files_alone(shared: ContainerEnvironment) -> None:
    # Given the links that the kernel shows of process 1; when they are followed; then they lead inside
    assert printed(shared, "ls /proc/1/root/") == printed(shared, "ls /")
    assert printed(shared, "ls -di /proc/1/root/bin | awk '{print $1}'") == printed(shared, "ls -di /bin | awk '{print $1}'")
    assert "probe" in printed(shared, "ls /proc/1/cwd/bin")
