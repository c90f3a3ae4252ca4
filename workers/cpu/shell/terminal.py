"""The terminal of a command: made in the place where the command runs, so that this sees it under /dev/pts.

The worker opens the master below the root folder of the session's shell, as the user of that. The shell leads a session of the operating
system and has no terminal. So the first terminal that it opens, for the command's input, becomes its controlling one: Ctrl-C and changes
of the size reach the command.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios

from workers.cpu.abstract import WindowSize
from workers.cpu.errors import SessionUnavailable
from workers.cpu.root import as_user, open_in_root
from workers.cpu.shell.output import CHUNK_BYTES, Capture

TYPE = "xterm-256color"
"""What TERM says at a terminal."""
INTERRUPT, END = b"\x03", b"\x04"
"""What Ctrl-C and Ctrl-D type."""

MOST_AT_END = 1024 * 1024

_MASTER_DEVICE = os.makedev(5, 2)
_GET_NUMBER, _SET_LOCK, _GET_PEER = 0x80045430, 0x40045431, 0x5441
_FLAGS = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK


class Terminal:
    """A terminal for the commands of the shell `pid`, of a size."""

    def __init__(self, pid: int, size: WindowSize) -> None:
        """Make it. Raises `SessionUnavailable` where there can be none."""
        try:
            self.descriptor = _open_master(pid)
        except OSError as error:
            raise SessionUnavailable(f"there is no terminal to be had: {error}") from error
        try:
            fcntl.ioctl(self.descriptor, _SET_LOCK, struct.pack("i", 0))
            (number,) = struct.unpack("i", fcntl.ioctl(self.descriptor, _GET_NUMBER, b"\0" * 4))
            # Held open, so that the terminal does not hang up before the command has opened it.
            self._peer = fcntl.ioctl(self.descriptor, _GET_PEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self.descriptor)
            raise SessionUnavailable(f"there is no terminal to be had: {error}") from error
        self.path = f"/dev/pts/{number}"
        self.resize(size)

    def resize(self, size: WindowSize) -> None:
        """Give it another size; the program in the foreground learns that by SIGWINCH."""
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))

    def close(self) -> None:
        """Have it hang up."""
        os.close(self._peer)
        os.close(self.descriptor)


def _open_master(pid: int) -> int:
    """Open a master where the process `pid` is, and as its user, to whom the terminal then belongs. Raises `OSError`."""
    if os.stat(f"/proc/{pid}/ns/mnt").st_ino == os.stat("/proc/self/ns/mnt").st_ino:
        return os.open("/dev/ptmx", _FLAGS)
    owner = os.stat(f"/proc/{pid}")
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with as_user(owner.st_uid, owner.st_gid):
            descriptor = open_in_root(root, "/dev/pts/ptmx", _FLAGS | os.O_NOFOLLOW)
    finally:
        os.close(root)
    found = os.fstat(descriptor)
    # /dev and /dev/pts are mounts there, from the latter of which nothing can be removed. A command can have made neither of them.
    if not stat.S_ISCHR(found.st_mode) or found.st_rdev != _MASTER_DEVICE:
        os.close(descriptor)
        raise OSError("/dev/pts/ptmx is not what it should be")
    return descriptor


class TerminalCapture(Capture):
    """What is printed at a terminal, during one command."""

    def _take(self, most: int) -> int:
        data = os.read(self.descriptor, most)
        self._printed.add(data)
        return len(data)

    def pull(self, most: int = CHUNK_BYTES) -> int:
        try:
            return super().pull(most)
        except OSError:  # it has hung up
            return 0

    def finish(self) -> bool:
        """Take what was printed until now, up to a bound; the terminal hangs up then, so nobody prints there any more."""
        left = MOST_AT_END
        while left > 0 and (came := self.pull()):
            left -= came
        return False
