"""Who belongs to a session, and how all of them are ended.

A session is everything below its supervisor, to which orphans go.

A kill walks again and again, and signals what it finds. Some processes fork and end faster than one walk takes. Each of them becomes a
child of the supervisor sooner or later, which shows that the kill is not over.

Rules: the standard library only; the supervisor process imports this file.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from workers.cpu.process import tree
from workers.cpu.process.socket_server import Wakeup

KILL_LIMIT_S = 10.0
"""After this time, what still lives is stuck in the kernel, and a kill gives up."""

PAUSE_S = 0.005
EMPTY_WALKS = 3
"""A walk that finds nothing is made so often: the kernel's list of children can lack some while others end."""


@dataclass(frozen=True, slots=True)
class Members:
    """The processes of a session."""

    supervisor: int = 0
    shell: int = 0

    def with_zombies(self, spared: Collection[tree.Identity]) -> list[tree.Process]:
        """Return the shell and what commands have started, without `spared` processes and what is below those."""
        return tree.with_zombies(self.supervisor, spared)

    def settled(self, spared: Collection[tree.Identity] = ()) -> tuple[list[tree.Process], bool]:
        """Return the living ones, and whether that surely is all: while a process dies its children are handed on."""
        return tree.settled(self.supervisor, spared)

    def has_others(self) -> bool:
        """Return whether a living one is found that is not the shell, or one may have been missed."""
        found, is_all = self.settled()
        return not is_all or any(process.pid != self.shell for process in found)

    def nearest(self) -> list[int]:
        """Return the ids of the processes right below the supervisor, where a process comes whose parent has ended."""
        return tree.children(self.supervisor, 1)


def kill(
    members: Members,
    spared: Collection[tree.Identity],
    grace_s: float,
    wakeup: Wakeup,
    reap: Callable[[], object],
) -> list[int]:
    """End the members: by SIGTERM, after `grace_s` seconds by SIGKILL, until none is found. Called by their supervisor.

    Returns the ids of those that still live after `KILL_LIMIT_S`.
    """
    began = time.monotonic()
    if grace_s > 0:
        for process in members.settled(spared)[0]:
            tree.send(process, signal.SIGTERM)
            # A stopped process takes the signal only once it goes on.
            tree.send(process, signal.SIGCONT)
    while True:
        reap()
        living, is_all = _walk(members, spared)
        if not living and not spared:
            # Processes that no walk has found are children of this process by now.
            is_all = not has_children()
        age_s = time.monotonic() - began
        if (is_all and not living) or age_s > KILL_LIMIT_S:
            return [process.pid for process in living] or ([] if is_all else tree.children(members.supervisor))
        if age_s >= grace_s:
            for process in living:
                tree.send(process, signal.SIGKILL)
        wakeup.wait(PAUSE_S)


def _walk(members: Members, spared: Collection[tree.Identity]) -> tuple[list[tree.Process], bool]:
    """Return the first walk that finds something, or the last of `EMPTY_WALKS`."""
    for _ in range(EMPTY_WALKS - 1):
        if (found := members.settled(spared))[0]:
            return found
    return members.settled(spared)


def has_children() -> bool:
    """Return whether this process has a child, be it one that has ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
