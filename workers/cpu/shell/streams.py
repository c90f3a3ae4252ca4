"""The standard streams of one command, as the worker has them.

| asked for | input | output |
|---|---|---|
| nothing | `/dev/null` | the two FIFOs of the session |
| `stdin` | a FIFO of the command's own, which the worker keeps open until the input ends | the same |
| `terminal` | a terminal | the same terminal, taken for standard output |

What cannot be written yet, as the command does not read, waits here, up to `MOST_INPUT`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from functools import partial

from tangram.arguments import script_place
from workers.cpu.abstract import Data, EndOfInput, ExecRequest, WindowSize
from workers.cpu.dop import with_dop
from workers.cpu.shell.dialect import READ_BY_SHELL, make_fifo, remove_file
from workers.cpu.shell.left_run import Shell
from workers.cpu.shell.output import CHUNK_BYTES, Capture
from workers.cpu.shell.run_memory import Printed
from workers.cpu.shell.session import Session
from workers.cpu.shell.terminal import END, TYPE, Terminal, TerminalCapture

MOST_INPUT = 4 * 1024 * 1024
NAMES = ("stdout", "stderr")
INPUT, SCRIPT = "in", "script"


class CommandStreams:
    """The streams of a command that `shell` is about to run."""

    def __init__(self, session: Session, request: ExecRequest, shell: Shell, *, resumes: bool) -> None:
        """Open them; one that `resumes` has begun under the worker before this one. Raises `SessionUnavailable` without a terminal."""
        self.terminal: Terminal | None = None
        self.input = -1
        """The descriptor that input is written to, none after its end."""
        self._request = request
        self._waiting = bytearray()
        self._at_end = False
        self._opened = contextlib.ExitStack()
        self._opened.callback(self._close_input)
        with self._opened:
            has_words = request.interpreter is not None and not resumes
            self.words = self._program(session, [*(request.interpreter or ()), request.command]) if has_words else None
            """The program and arguments of the command, if it has some."""
            if request.terminal is not None:
                self.terminal = self._opened.enter_context(contextlib.closing(Terminal(shell.pid, request.terminal)))
                self.input = os.dup(self.terminal.descriptor)
                self.captures = [self._capture(TerminalCapture, self.terminal.descriptor, session.memory.printed[0], NAMES[0])]
                self.files = (self.terminal.path, self.terminal.path, self.terminal.path)
            else:
                out, err = session.streams
                places = zip((out, err), session.memory.printed, NAMES, strict=True)
                self.captures = [self._capture(Capture, fifo.path, printed, name) for fifo, printed, name in places]
                stdin = self._open_input(session) if request.stdin else os.devnull
                self.files = (stdin, session.control.seen(out.path), session.control.seen(err.path))
            if not resumes:
                for printed in session.memory.printed:
                    printed.empty()
            self._opened = self._opened.pop_all()

    def _capture(self, kind: type[Capture], source: str | int, printed: Printed, name: str) -> Capture:
        on_output = partial(self._request.on_output, name) if self._request.on_output is not None else None
        limit_bytes = self._request.output_limit_bytes
        tail_bytes = int(limit_bytes * self._request.output_tail_fraction)
        return self._opened.enter_context(contextlib.closing(kind(source, printed, limit_bytes - tail_bytes, tail_bytes, on_output)))

    def _program(self, session: Session, words: list[str]) -> list[str]:
        """Return what is to be run for `words`: a text that is too long for an argument goes into a file, which a shell reads."""
        if (place := script_place(words)) is None:
            return words
        path = f"{session.control.folder}/{SCRIPT}"
        session.control.write(path, words[place].encode())
        self._opened.callback(remove_file, path)
        return [*words[:place], f". {shlex.quote(session.control.seen(path))}", *words[place + 1 :]]

    def _open_input(self, session: Session) -> str:
        """Make the FIFO, open both its ends, and return it as the shell sees it."""
        path = f"{session.control.folder}/{INPUT}"
        remove_file(path)
        make_fifo(path, READ_BY_SHELL)
        self.input = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return session.control.seen(path)

    def variables(self, dop: int) -> dict[str, str]:
        """Return the environment variables of the command, with the DoP `dop`."""
        given = self._request.variables
        return with_dop(dop, {"TERM": TYPE, **given} if self.terminal is not None else given)

    def give(self, given: Data | EndOfInput | WindowSize) -> str:
        """Take in what the command is given; return why it must be ended for that, or nothing."""
        if isinstance(given, WindowSize):
            if self.terminal is not None:
                self.terminal.resize(given)
        elif self.input < 0 or self._at_end:
            return ""
        elif isinstance(given, Data):
            self._waiting += given.data
        elif self.terminal is not None:
            self._waiting += END
        else:
            self._at_end = True
        return f"it did not read its input: more than {MOST_INPUT} bytes waited" if len(self._waiting) > MOST_INPUT else ""

    def write(self) -> bool:
        """Write what can be written now, and end the input where that is due; return whether something is left."""
        with contextlib.suppress(BlockingIOError):
            while self._waiting:
                del self._waiting[: os.write(self.input, self._waiting[:CHUNK_BYTES])]
        if self._at_end and not self._waiting:
            self._close_input()
        return bool(self._waiting)

    def _close_input(self) -> None:
        if self.input >= 0:
            os.close(self.input)
        self.input = -1

    def outputs(self) -> tuple[bytes, bytes]:
        """Return what was printed and kept, by stream."""
        out, *err = self.captures
        return out.data, err[0].data if err else b""

    def close(self) -> None:
        """Give all descriptors back."""
        self._opened.close()
