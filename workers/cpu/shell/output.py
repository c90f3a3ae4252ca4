"""What a command prints: captured up to a limit, and thrown away beyond it.

A stream is a FIFO in the session's protocol folder. One that a background process still holds when its command is over
goes to the `Drain`, so that the process neither blocks nor dies of SIGPIPE; the next command gets a fresh FIFO, so
that late output of one command never appears in another's.
"""

from __future__ import annotations

import array
import fcntl
import os
import re
import select
import termios
import threading
from collections.abc import Callable

from workers.cpu.shell.dialect import WRITTEN_BY_SHELL, make_fifo, remove_file
from workers.cpu.shell.run_memory import Printed

CHUNK_BYTES = 65_536
DRAIN_PAUSE_S = 0.01


class StreamFifo:
    """The FIFO of one stream of a session; renewed when it was handed to the drain. One that a worker has `left` is gone on with."""

    def __init__(self, folder: str, name: str, *, left: bool = False) -> None:
        self._folder, self.name, self._count = folder, name, 0
        if left:
            found = [int(file.rpartition(".")[2]) for file in os.listdir(folder) if re.fullmatch(rf"{name}\.[0-9]+", file)]
            if not found:
                raise FileNotFoundError(f"the FIFO {name} of the session is gone")
            self._count = max(found)
            self.path = self._path
        else:
            self.path = self._make()

    @property
    def _path(self) -> str:
        return f"{self._folder}/{self.name}.{self._count}"

    def _make(self) -> str:
        make_fifo(self._path, WRITTEN_BY_SHELL)
        return self._path

    def renew(self) -> None:
        """Use another FIFO from now on; whoever has the old one open keeps it."""
        remove_file(self.path)
        self._count += 1
        self.path = self._make()


class Capture:
    """The reading end of one stream during one command; keeps the first `head_bytes` and the last `tail_bytes` of what is `printed`.

    The stream is the FIFO at a path, or what a descriptor that does not block stands for. `on_output` is called with all that comes.
    """

    def __init__(
        self,
        source: str | int,
        printed: Printed,
        head_bytes: int,
        tail_bytes: int = 0,
        on_output: Callable[[bytes], None] | None = None,
    ) -> None:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = os.dup(source) if isinstance(source, int) else os.open(source, flags)
        self._head_bytes, self._tail_bytes, self._printed, self._on_output = head_bytes, tail_bytes, printed, on_output

    @property
    def truncated(self) -> bool:
        """Whether something is not kept."""
        return self._left_out > 0

    @property
    def _left_out(self) -> int:
        return max(0, self._printed.size - self._head_bytes - self._tail_bytes)

    @property
    def data(self) -> bytes:
        """Return the bytes kept, with a line where others are left out."""
        if not self._left_out:
            return self._printed.read(0, self._printed.size)
        head, tail = self._printed.read(0, self._head_bytes), self._printed.read(self._printed.size - self._tail_bytes, self._tail_bytes)
        return head + f"\n[{self._left_out} bytes are left out here: TANGRAM_OUTPUT_LIMIT_BYTES]\n".encode() + tail

    def pull(self, most: int = CHUNK_BYTES) -> int:
        """Take what is there, up to `most` bytes; return how many came, 0 when nobody writes or nothing is there."""
        try:
            return self._read(most)
        except BlockingIOError:
            return 0

    def _read(self, most: int) -> int:
        """Take what is there; return 0 when nobody writes. Raises `BlockingIOError` when somebody might."""
        printed = self._printed
        came = self._take(most)
        if self._on_output is not None and came:
            self._on_output(printed.read(printed.size - came, came))
        printed.drop(self._head_bytes, printed.size - self._tail_bytes)
        return came

    def _take(self, most: int) -> int:
        return self._printed.take(self.descriptor, most)

    def was_opened(self) -> bool:
        """Return whether any process has opened the stream for writing since this end was opened.

        Only then does a FIFO hang up; before, it has no event, and reading finds its end at once.
        """
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        if poller.poll(0):
            return True
        try:
            return self._read(CHUNK_BYTES) > 0
        except BlockingIOError:
            return True

    def finish(self) -> bool:
        """Take what was printed until now; return whether a process still holds the stream.

        The pipe's fill level is asked once: a background process that prints without end must not hold the result.
        """
        waiting = array.array("i", [0])
        fcntl.ioctl(self.descriptor, termios.FIONREAD, waiting)
        left = waiting[0]
        while left > 0 and (came := self.pull(min(left, CHUNK_BYTES))):
            left -= came
        try:
            return os.read(self.descriptor, CHUNK_BYTES) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)


class Drain:
    """Reads streams that outlive their command, and throws away what comes, on one thread that starts when needed.

    After each round it pauses, so a background process that prints without end is held to a few MB/s.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._poller = select.epoll()
        self._descriptors: set[int] = set()
        self._stop = threading.Event()

    def adopt(self, descriptor: int) -> None:
        """Take over a reading end; it is closed once nobody writes to it any more."""
        with self._lock:
            if self._stop.is_set():
                os.close(descriptor)
                return
            self._descriptors.add(descriptor)
            self._poller.register(descriptor, select.EPOLLIN)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tangram-drain", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for descriptor, _ in self._poller.poll(0.5):
                self._discard(descriptor)
            self._stop.wait(DRAIN_PAUSE_S)

    def _discard(self, descriptor: int) -> None:
        try:
            came = len(os.read(descriptor, CHUNK_BYTES))
        except BlockingIOError:
            return
        if came == 0:
            with self._lock:
                self._poller.unregister(descriptor)
                self._descriptors.discard(descriptor)
                os.close(descriptor)

    def close(self) -> None:
        """Stop, and close every stream."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()
            self._poller.close()
