"""How a supervisor and the fork server end what is below them: until no process is found, and none is left that no walk finds.

Rules: the standard library only, one thread; the supervisor process imports this file.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

from workers.cpu.process import tree
from workers.cpu.process.namespace import Anchor

KILL_LIMIT_S = 10.0
STUBBORN_S = 1.0
WALKS = 3


class Wakeup:
    """A file descriptor that becomes readable when a child has ended."""

    def __init__(self) -> None:
        self.reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def clear(self) -> None:
        """Take the pending wake-ups."""
        try:
            os.read(self.reading, 4096)
        except BlockingIOError:
            return

    def wait(self, limit_s: float) -> None:
        """Return once a child has ended, or after `limit_s` seconds."""
        select.select([self.reading], [], [], limit_s)
        self.clear()

    def close(self) -> None:
        """Give the descriptors back, in the child of a fork."""
        signal.set_wakeup_fd(-1)
        os.close(self.reading)
        os.close(self._writing)


def kill_below(
    spared: set[tree.Identity], grace_s: float, wakeup: Wakeup, reap: Callable[[], object], anchor: Anchor | None = None
) -> list[int]:
    """End the processes below this one, but for a `anchor`: SIGTERM, after `grace_s` seconds SIGKILL, until none is found.

    What starts processes faster than they are found goes with the anchor, `STUBBORN_S` seconds later.
    Returns the ids of those that still live `KILL_LIMIT_S` seconds later (stuck in the kernel).
    """
    began = time.monotonic()
    roots, passed = below_with(os.getpid(), anchor)
    if grace_s > 0:
        for process in tree.descendants(roots, spared, passed):
            tree.send(process, signal.SIGTERM)
            # A stopped process takes the signal only once it goes on.
            tree.send(process, signal.SIGCONT)
    while True:
        reap()
        living, is_all = first_found(lambda: tree.settled(roots, spared, passed))
        if not living and not spared and anchor is None:
            # Whom no walk finds, as it forks and ends faster than one goes, is a child of this process sooner or later.
            is_all = not has_children()
        age_s = time.monotonic() - began
        if (is_all and not living) or age_s > KILL_LIMIT_S:
            return [process.pid for process in living] or ([] if is_all else tree.children(os.getpid()))
        if anchor is not None and age_s >= grace_s + STUBBORN_S:
            anchor.end()
        if age_s >= grace_s:
            for process in living:
                tree.send(process, signal.SIGKILL)
        wakeup.wait(0.005)


def first_found(walk: Callable[[], tuple[list[tree.Process], bool]]) -> tuple[list[tree.Process], bool]:
    """Return the first walk that finds something, of `WALKS`: the kernel's list of children can lack some while others end."""
    for _ in range(WALKS - 1):
        if (found := walk())[0]:
            return found
    return walk()


def has_children() -> bool:
    """Return whether this process has a child, be it one that has ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def below_with(supervisor: int, anchor: Anchor | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where a walk of a session's processes starts, and what it passes over."""
    return ((supervisor,), ()) if anchor is None else ((supervisor, anchor.init.pid), anchor.pids)
