"""System calls that no command of a session that is set apart may make, and those that it must be able to make."""

from __future__ import annotations

import errno
import os

import pytest

from tests.sandboxes.support import errors_of_calls
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.seccomp import ARCHITECTURES, LAST, filter_for

from .support import printed

COLUMN, _, CLONE, IOCTL, SOCKET = ARCHITECTURES[os.uname().machine]
NEW_USER, NEW_NET = 0x10000000, 0x40000000
TIOCSTI = 0x5412

THREADS_AND_CHILDREN = """
import multiprocessing, socket, subprocess, threading
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
said = subprocess.run(["sh", "-c", "echo child"], capture_output=True, text=True, check=True).stdout.strip()
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(sorted(done), said, pool.map(abs, [-1, -2]))
"""

# getpid by the system call of 32-bit programs; 20 is its number there.
OF_I386 = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("53b814000000cd805bc3"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""


def test_calls_are_refused_by_their_arguments_and_those_that_the_filter_does_not_know_do_not_exist(inside: ProcessEnvironment) -> None:
    # Given input for a terminal, and a socket to the hypervisor; clone3, whose flags are in memory, and the first call that is not known
    refused, unknown = [(IOCTL, 0, TIOCSTI), (IOCTL, 0, TIOCSTI | 1 << 32), (SOCKET, 40, 1)], [(435, 0, 0), (LAST + 1, 0, 0)]
    assert errors_of_calls(inside, *refused, *unknown) == {**dict.fromkeys(refused, errno.EPERM), **dict.fromkeys(unknown, errno.ENOSYS)}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86_64 has two more ways to make system calls")
def test_another_architecture_is_refused(inside: ProcessEnvironment) -> None:
    # Given getpid as x32 programs call it, and as 32-bit programs do; when a command asks; then it may not
    assert set(errors_of_calls(inside, (0x40000000 + 39, 0, 0)).values()) == {errno.EPERM}
    # The kernel answers 32-bit calls, or has none and ends the program
    inside.write_file("i386.py", OF_I386.encode())
    assert printed(inside, "python3 -S i386.py 2>/dev/null || echo signal") in (f"{-errno.EPERM}\n", "signal\n")


def test_programs_run_as_ever(inside: ProcessEnvironment) -> None:
    inside.write_file("program.py", THREADS_AND_CHILDREN.encode())
    assert printed(inside, "python3 program.py") == "[0, 1, 2, 3] child [1, 2]\n"


def test_no_process_of_the_session_is_without_the_filter(inside: ProcessEnvironment) -> None:
    modes = printed(inside, "grep -h ^Seccomp: /proc/[0-9]*/status | sort | uniq -c").split()
    assert modes[1:] == ["Seccomp:", "2"]
    assert int(modes[0]) >= 4


def test_both_machines_have_a_filter_and_others_have_none() -> None:
    # Given the machines that this runs on; when a filter is asked for; then it ends in an answer, and a jump leads nowhere else
    for machine in ARCHITECTURES:
        program = filter_for(machine)
        assert program is not None
        assert len(program) % 8 == 0
        assert len(program) // 8 < 256
    assert filter_for("riscv64") is None
