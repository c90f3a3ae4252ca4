"""The user that the programs of an environment are: one of its own where the worker may choose, else the worker's.

The kernel counts by user what programs may take of it: processes, inotify instances, descriptors on their way over sockets, buffers of
pipes. Where all environments are one user, one of them can take what all the others need. A worker that is root has more to give. Inside,
the user has the same id in every environment; see `namespace.py`.
"""

from __future__ import annotations

import itertools
import os
import secrets

from workers.cpu import control_files

FIRST, BLOCKS, BLOCK = 0x70000000, 4096, 65536
"""Ids that neither users nor services nor containers have by common convention, and how many of them a sandbox takes."""
NEEDED = sum(1 << capability for capability in (0, 1, 3, 5, 6, 7, 19, 21, 23))
"""CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SYS_PTRACE, SYS_ADMIN, SYS_NICE: what is done to another user's."""


class Users:
    """Gives ids of users, each once in a while: the sandbox takes a block of them at random, as others on this machine do."""

    def __init__(self) -> None:
        self._ids = itertools.cycle(range(start := FIRST + secrets.randbelow(BLOCKS) * BLOCK, start + BLOCK))
        self._adopted: set[int] = set()

    def take(self) -> int:
        """Return the id of the user, and group, of one more environment."""
        return next(user for user in self._ids if user not in self._adopted)

    def adopt(self, user: int) -> None:
        """Give an id to nobody else, which the worker before this one has given to an environment."""
        self._adopted.add(user)


def find_users() -> Users | None:
    """Return users to choose from; None where the worker is not root, or is root without some of its rights, or of some ids only."""
    rights = control_files.read("/proc/self/status").partition("CapEff:")[2].split()[0]
    if os.geteuid() != 0 or NEEDED & ~int(rights, 16):
        return None
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
        if not any(inside <= FIRST and inside + length >= FIRST + BLOCKS * BLOCK for inside, _, length in ranges):
            return None
    return Users()
