"""The filter of system calls of a session that bubblewrap sets apart: it refuses what Docker's default profile refuses.

The shell runs in a user namespace of the worker's own user. Without a filter its programs reach the whole kernel, such as `bpf`,
`userfaultfd`, `io_uring` or the keyrings, which no namespace covers. The filter is a program of classic BPF (seccomp(2)), which
the kernel runs at each system call of the shell and of everything that the shell starts.

| system call                                 | answer                                                                      |
|---------------------------------------------|-----------------------------------------------------------------------------|
| of another architecture (i386, x32)         | EPERM: its numbers mean other calls                                         |
| one of `REFUSED`                            | EPERM                                                                       |
| `clone` with a flag for a namespace         | EPERM                                                                       |
| `clone3`, whose flags are out of sight      | ENOSYS: the C library then uses `clone`                                     |
| `ioctl` that types into a terminal          | EPERM                                                                       |
| `socket` to the hypervisor                  | EPERM: network namespaces do not cover AF_VSOCK                             |
| later than `LAST`                           | ENOSYS: unknown to this filter, and programs know how to do without         |
| any other                                   | as without a filter                                                         |

Rules: the standard library only; the supervisor imports this file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from workers.cpu.libc import check, libc

LAST = 469
"""The highest number of a system call in Linux 6.18 (file_setattr)."""

CLONE3 = 435

REFUSED = {
    # name: (number on x86_64, number on aarch64); 0 where there is none
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "get_mempolicy": (239, 236),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, 0),
    "iopl": (172, 0),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, 0),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "uselib": (134, 0),
    "userfaultfd": (323, 282),
    "ustat": (136, 0),
    "vhangup": (153, 58),
}

ARCHITECTURES = {
    # os.uname().machine: (column of REFUSED, AUDIT_ARCH of linux/audit.h, clone, ioctl, socket)
    "x86_64": (0, 0xC000003E, 56, 16, 41),
    "aarch64": (1, 0xC00000B7, 220, 29, 198),
}

NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
AF_VSOCK = 40
X32_BIT = 0x40000000

# linux/bpf_common.h, linux/seccomp.h: load a word; jump if equal, at least, any bit set; return.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, FIRST, SECOND = 0, 4, 16, 24
"""Offsets in struct seccomp_data; of an argument the low half, which is all that the kernel reads of these."""

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def filter_for(machine: str) -> bytes | None:
    """Return the filter as an array of struct sock_filter; None for a machine whose system calls are not known here."""
    if machine not in ARCHITECTURES:
        return None
    column, architecture, clone, ioctl, socket = ARCHITECTURES[machine]
    numbers = sorted(number[column] for number in REFUSED.values() if number[column])
    # (operation, operand, where to go if that holds); else the next one follows.
    lines: list[tuple[int, int, str]] = [
        (LOAD, ARCHITECTURE, ""),
        (EQUAL, architecture, "known"),
        (RETURN, ERRNO | errno.EPERM, ""),
        (LOAD, NUMBER, "known:"),
        (AT_LEAST, X32_BIT, "refuse"),
        (AT_LEAST, LAST + 1, "missing"),
        (EQUAL, CLONE3, "missing"),
        (EQUAL, clone, "clone"),
        (EQUAL, ioctl, "ioctl"),
        (EQUAL, socket, "socket"),
        *((EQUAL, number, "refuse") for number in numbers),
        (RETURN, ALLOW, ""),
        (LOAD, FIRST, "clone:"),
        (ANY_BIT, NAMESPACE_FLAGS, "refuse"),
        (RETURN, ALLOW, ""),
        (LOAD, SECOND, "ioctl:"),
        *((EQUAL, request, "refuse") for request in TERMINAL_INPUT),
        (RETURN, ALLOW, ""),
        (LOAD, FIRST, "socket:"),
        (EQUAL, AF_VSOCK, "refuse"),
        (RETURN, ALLOW, ""),
        (RETURN, ERRNO | errno.ENOSYS, "missing:"),
        (RETURN, ERRNO | errno.EPERM, "refuse:"),
    ]
    places = {label[:-1]: place for place, (_, _, label) in enumerate(lines) if label.endswith(":")}
    jumps = (places[label] - place - 1 if label in places else 0 for place, (_, _, label) in enumerate(lines))
    return b"".join(struct.pack("=HBBI", code, jump, 0, operand) for (code, operand, _), jump in zip(lines, jumps, strict=True))


FILTER = filter_for(os.uname().machine)
"""The filter of this machine."""


def install(program: bytes) -> None:
    """Hold this process and all that it starts to a filter, for good. It must have given new privileges up. Raises `OSError`."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    wanted = Program(len(program) // 8, program)
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(wanted), 0, 0), "seccomp")
