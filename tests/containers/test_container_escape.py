"""Programs that look for a way out of their container find none."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.workers_cpu.support import RUN, admit, printed, run, until
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
        *[f"Cap{name}: 0000000000000000" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")],
        "NoNewPrivs: 1",
        "Seccomp: 2",
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


@pytest.mark.parametrize(
    "command",
    [
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw /proc/sys",
        "mount --bind / /tmp",
        "umount /run/tangram",
        "mknod /tmp/mem c 1 1",
        "mknod /tmp/disk b 254 0",
        "cat /dev/mem",
        "cat /dev/kmsg",
        "head -c 1 /proc/kcore",
        "head -c 1 /proc/kmsg",
        "echo b >/proc/sysrq-trigger",
        "echo x >/proc/sys/kernel/core_pattern",
        "echo 1 >/proc/sys/kernel/hostname",
        "echo 0 >/proc/sys/vm/overcommit_memory",
        "echo mem >/sys/power/state",
        "echo x >/sys/kernel/uevent_helper",
        "echo -1000 >/proc/self/oom_score_adj",
        "unshare -r true",
        "nsenter -t 1 -m true",
        "chroot / true",
        "su -c true",
        "insmod /tmp/x.ko",
        "reboot -f",
        "swapon /tmp/x",
        "hostname other",
        "dmesg | grep .",
        "touch /etc/passwd",
        "touch /bin/other",
        "touch /run/other",
        "echo x >>/etc/passwd",
        "find / -name 'docker*.sock' 2>/dev/null | grep .",
        "find / -name 'containerd*.sock' 2>/dev/null | grep .",
        "ls /proc/1/root/var/lib/docker",
        "cat /etc/shadow",
        "ls /dev/sda /dev/vda /dev/fuse /dev/kvm /dev/net/tun 2>/dev/null | grep .",
    ],
)
def test_the_host_is_out_of_reach(shared: ContainerEnvironment, command: str) -> None:
    # Given a container; when a command tries a way to the host; then it fails
    outcome = run(shared, f"({command})")
    assert outcome.status == "succeeded"
    assert outcome.exit_code not in (0, None), outcome
    assert len(outcome.stdout) < 4096


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


def test_process_1_leads_to_the_own_files_alone(shared: ContainerEnvironment) -> None:
    # Given the links that the kernel shows of process 1; when they are followed; then they lead inside
    assert printed(shared, "ls /proc/1/root/") == printed(shared, "ls /")
    assert printed(shared, "ls -di /proc/1/root/bin | awk '{print $1}'") == printed(shared, "ls -di /bin | awk '{print $1}'")
    assert "probe" in printed(shared, "ls /proc/1/cwd/bin")


def test_processes_of_the_host_and_of_others_are_neither_seen_nor_reached(env: ContainerEnvironment, shared: ContainerEnvironment) -> None:
    # Given a process in another environment
    printed(shared, f"sleep 321.6543{RUN} & true")
    # When a command looks for it, and sends signals to ids of the host
    assert f"321.6543{RUN}" not in printed(env, "ps; cat /proc/[0-9]*/cmdline")
    outcome = run(env, f"kill -9 {os.getpid()} {shared.container.pid}")
    # Then nothing is found
    assert outcome.exit_code != 0
    assert printed(shared, "echo alive") == "alive\n"


def test_files_and_memory_of_others_are_not_seen(box: ContainerSandbox, env: ContainerEnvironment, shared: ContainerEnvironment) -> None:
    # Given files of another environment, in its work folder, in /tmp and in memory
    printed(shared, "echo secret >/work/secret-1; echo secret >/tmp/secret-2; echo secret >/dev/shm/secret-3")
    # When a command looks for them, and for control folders
    assert printed(env, "find / -name 'secret-*' 2>/dev/null; true") == ""
    # Then there is only its own control folder
    assert printed(env, "ls /run/tangram").split() == sorted(os.listdir(env.container.control))
    assert printed(env, f"test -e {env.container.control.parent} || echo none") == "none\n"


def test_other_environments_cannot_be_watched_through_shared_memory(env: ContainerEnvironment, shared: ContainerEnvironment) -> None:
    # Given two environments; when they look at their namespaces; then they share none but those that tell nothing
    look = "for each in mnt pid net ipc uts; do readlink /proc/self/ns/$each; done"
    assert not set(printed(env, look).split()) & set(printed(shared, look).split())
    host = {os.readlink(f"/proc/self/ns/{each}") for each in ("mnt", "pid", "net", "ipc", "uts")}
    assert not host & set(printed(env, look).split())


# -- the network -----------------------------------------------------------------------------------------------------


@contextmanager
def listening(family: int, address: object) -> Iterator[socket.socket]:
    """Listen, and give the socket."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)  # type: ignore[arg-type]
        server.listen()
        server.settimeout(0.05)
        yield server


def docker_address() -> str:
    """Return the host's address on the engine's bridge."""
    lines = os.popen("ip -4 -o addr show docker0 2>/dev/null").read().split()
    return lines[3].split("/")[0] if len(lines) > 3 else "172.17.0.1"


def test_no_listener_of_the_host_can_be_reached(shared: ContainerEnvironment) -> None:
    # Given a listener on all addresses of the host
    with listening(socket.AF_INET, ("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        # When a command connects to each of them
        for host in ("127.0.0.1", docker_address(), "0.0.0.0", "host.docker.internal", socket.gethostname()):
            outcome = run(shared, f"echo hello | timeout 1 nc {host} {port}")
            assert outcome.exit_code != 0, (host, outcome)
        # Then nobody comes
        with pytest.raises(TimeoutError):
            server.accept()


def test_no_abstract_socket_of_the_host_can_be_reached(shared: ContainerEnvironment) -> None:
    # Given a listener on a name that is no file
    name = f"{NODE}-listens"
    with listening(socket.AF_UNIX, f"\0{name}") as server:
        # When a command connects to it; then there is none
        assert printed(shared, f"probe abstract {name}") == f"{errno.ECONNREFUSED}\n"
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("command", ["nc 1.1.1.1 53", "ping -c1 1.1.1.1", "nslookup example.org", "wget -O- http://1.1.1.1/"])
def test_nothing_outside_can_be_reached(shared: ContainerEnvironment, command: str) -> None:
    # Given a container without a network; when a command asks for something outside; then it fails
    assert run(shared, f"timeout 1 {command}").exit_code not in (0, None)


def test_there_is_no_way_to_other_containers(shared: ContainerEnvironment) -> None:
    # Given a container; when it looks for interfaces; then it has the loop alone, and no route
    assert printed(shared, "ls /sys/class/net") == "lo\n"
    assert printed(shared, "tail -n +2 /proc/net/route") == ""
