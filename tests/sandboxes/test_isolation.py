"""Programs that look for a way out of a sandbox that sets them apart find none; without isolation few are stopped."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.workers_cpu.support import RUN, printed, run, sleepers
from workers.cpu.abstract import Environment, EnvironmentSpec, Sandbox
from workers.cpu.process.seccomp import ARCHITECTURES, REFUSED

from .conftest import params
from .support import errors_of_calls

pytestmark = pytest.mark.parametrize("place", params("bubblewrap", "view", "container"))
COLUMN, _, CLONE, _, SOCKET = ARCHITECTURES[os.uname().machine]
NEW_USER, NEW_NET = 0x10000000, 0x40000000
CONNECTS = "python3 -S -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)'"


@pytest.fixture
def other(sandbox: Sandbox) -> Iterator[Environment]:
    environment = sandbox.open(EnvironmentSpec(id="other"))
    yield environment
    environment.close()


EVERYWHERE = [
    *[f"touch {folder}/escaped" for folder in ("", "/usr", "/etc", "/bin", "/run")],
    "mkdir /home/escaped",
    "echo x >>/etc/passwd",
    "cat /etc/shadow",
    "mount -t tmpfs none /tmp",
    "mount --bind / /tmp",
    "mount -o remount,rw /usr",
    "mount -o remount,rw /proc/sys",
    "umount /proc/sys",
    "mknod /tmp/mem c 1 1",
    "mknod /tmp/disk b 254 0",
    "unshare -r true",
    "nsenter -t 1 -m true",
    "chroot / true",
    "su -c true",
    "hostname escaped",
    "swapon /tmp/x",
    "insmod /tmp/x.ko",
    "reboot -f",
    "dmesg | grep .",
    "echo /x >/proc/sys/kernel/core_pattern",
    "echo 1 >/proc/sys/kernel/hostname",
    "echo 1 >/proc/sys/vm/drop_caches",
    "echo 0 >/proc/sys/vm/overcommit_memory",
    "echo b >/proc/sysrq-trigger",
    "echo 0 >/sys/devices/system/cpu/cpu1/online",
    "echo mem >/sys/power/state",
    "echo x >/sys/kernel/uevent_helper",
    "echo -1000 >/proc/self/oom_score_adj",
    "cat /dev/mem",
    "cat /dev/kmsg",
    "head -c 1 /proc/kcore",
    "head -c 1 /proc/kmsg",
    "ls /dev | grep -E '^(sd|vd|nvme|mem|kmsg|kvm|fuse)'",
    "ls /proc/1/root/var/lib/docker",
    "find / \\( -path /usr -o -path /proc -o -path /root \\) -prune -o -type s -print | grep -E 'docker|containerd'",
    "python3 -S -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
    "python3 -S -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'",
    "python3 -S -c 'import os; os.setuid(12345)'",
    "python3 -S -c 'import os; os.setgid(12345)'",
    "python3 -S -c 'import os; os.setgroups([0])'",
    "python3 -S -c 'import os; os.nice(-1)'",
    "python3 -S -c 'import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))'",
    f"{CONNECTS} 192.0.2.1 80",
    f"{CONNECTS} example.org 80",
]


def test_what_a_command_must_not_do_fails(env: Environment) -> None:
    for command in EVERYWHERE:
        outcome = run(env, f"({command})")
        assert outcome.status == "succeeded" and outcome.exit_code not in (0, None) and len(outcome.stdout) < 4096, (command, outcome)
    assert printed(env, "echo alive") == "alive\n"


def test_no_process_has_rights(place: str, env: Environment) -> None:
    without = {*[f"Cap{name}: 0000000000000000" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")], "NoNewPrivs: 1", "Seccomp: 2"}
    if place == "container":
        without |= {"Uid: 1000 1000 1000 1000", "Gid: 1000 1000 1000 1000", "Groups: 1000"}
    else:
        assert printed(env, "grep -vw nosuid /proc/self/mounts | grep -v ' /dev/'; true") == ""
    # Process 1 of bubblewrap is another user's
    for process in ("self", "$$", *(["1"] if place == "container" else [])):
        assert without <= {" ".join(each.split()) for each in printed(env, f"cat /proc/{process}/status").splitlines()}


LET_BY_OLDER_ENGINES = {"io_uring_setup", "io_uring_enter", "io_uring_register", "clock_adjtime"}


def test_system_calls_of_the_list_are_refused(place: str, env: Environment) -> None:
    assert {"mount", "bpf", "keyctl", "unshare", "setns", "io_uring_setup", "userfaultfd"} <= set(REFUSED)
    passed = LET_BY_OLDER_ENGINES if place == "container" else set()
    calls = [(numbers[COLUMN], 0, 0) for name, numbers in REFUSED.items() if numbers[COLUMN] and name not in passed]
    assert set(errors_of_calls(env, *calls, (CLONE, NEW_USER, 0), (CLONE, NEW_NET, 0)).values()) <= {errno.EPERM, errno.ENOSYS}


def test_nothing_of_other_environments_and_of_the_worker_is_there(env: Environment, other: Environment, tmp_path: Path) -> None:
    word = f"secret-{secrets.token_hex(4)}"
    folders = printed(other, f"for f in $HOME $TMPDIR /tmp /dev/shm; do echo {word} >$f/{word} && echo $f; done 2>/dev/null; :").split()
    (tmp_path / word).write_text(word)
    # Below /usr and /proc there is no folder in which either of them has written
    looks = (
        f"cat {' '.join(f'{folder}/{word}' for folder in (*folders, tmp_path))}",
        f"find / \\( -path /usr -o -path /proc \\) -prune -o -name '{word}' -print",
        f"grep -rs {word[:9]} /tmp /home /run /dev/shm {tmp_path.parent} | grep -v Binary",
    )
    found = run(env, "; ".join(looks))
    assert len(folders) >= 2
    assert word.encode() not in found.stdout


def test_processes_of_the_host_and_of_others_are_neither_seen_nor_reached(env: Environment, other: Environment) -> None:
    printed(other, f"sleep 321.6543{RUN} & true")
    (pid,) = sleepers(f"321.6543{RUN}")
    assert f"321.6543{RUN}" not in printed(env, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert int(printed(env, "ls -d /proc/[0-9]* | wc -l")) < 20
    for number in (os.getpid(), pid):
        assert run(env, f"cat /proc/{number}/environ || kill -9 {number}").exit_code != 0
    sleepers(f"321.6543{RUN}")


def test_namespaces_are_the_environments_own(env: Environment, other: Environment) -> None:
    kinds = ("mnt", "pid", "net", "ipc", "uts")
    look = f"for each in {' '.join(kinds)}; do readlink /proc/self/ns/$each; done"
    mine, others = (set(printed(each, look).split()) for each in (env, other))
    assert len(mine) == len(kinds)
    assert not mine & (others | {os.readlink(f"/proc/self/ns/{each}") for each in kinds})


@contextmanager
def listening(family: int, address: object) -> Iterator[socket.socket]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(address)  # type: ignore[arg-type]
        server.listen()
        server.setblocking(False)
        yield server


def docker_address() -> str:
    """Return the host's address on the engine's bridge."""
    lines = os.popen("ip -4 -o addr show docker0 2>/dev/null").read().split()
    return lines[3].split("/")[0] if len(lines) > 3 else "172.17.0.1"


def test_no_listener_of_the_host_can_be_reached(env: Environment) -> None:
    name = f"tangram-test-{secrets.token_hex(4)}"
    with listening(socket.AF_INET, ("0.0.0.0", 0)) as server, listening(socket.AF_UNIX, f"\0{name}") as unix:
        port = server.getsockname()[1]
        for host in ("127.0.0.1", docker_address(), "0.0.0.0", "host.docker.internal", socket.gethostname()):
            assert run(env, f"{CONNECTS} {host} {port}").exit_code != 0, host
        assert run(env, f"python3 -S -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0{name}\")'").exit_code != 0
        for each in (server, unix):
            with pytest.raises(BlockingIOError):
                each.accept()


def test_there_is_no_interface_but_the_loopback_and_no_route(env: Environment) -> None:
    assert [line.split(":")[0].strip() for line in printed(env, "cat /proc/net/dev").splitlines()[2:]] == ["lo"]
    assert printed(env, "tail -n +2 /proc/net/route") == ""
