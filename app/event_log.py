"""The event log as a file: written by the live scheduler, read again by `python -m app.event_log FILE`.

Reading takes every event of the log to a core of its own and compares what follows with what the log says: it prints
how many decisions are equal, or the first line that differs (exit 1). A log that cannot be read is one line, exit 2.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from scheduler.live.event_log import BrokenLog, Handled, Line, Opening, Replay, Setup, decode_line, encode_commands, encode_line
from scheduler.model.commands import Command
from scheduler.model.events import Event
from tangram.errors import TangramError

log = logging.getLogger(__name__)

EXIT_DIFFERS, EXIT_BAD_INPUT = 1, 2
_BLOCK_BYTES = 1 << 16


class EventLogFile:
    """Adds to the file `path`. Once that fails, it goes on without: a log is no reason to stop scheduling."""

    def __init__(self, path: Path, epoch: int, setup: Setup) -> None:
        """Open the file and write what the core is made of. Raises `OSError`."""
        self._path = path
        self._epoch = epoch
        self._file: TextIO | None = open_to_add(path)
        _cut_last_line(path)
        self._add(Opening(epoch=epoch, setup=setup))
        self.flush()

    def handled(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Note an event and what followed from it."""
        self._add(Handled(epoch=self._epoch, at=now, event=event, commands=tuple(commands)))

    def flush(self) -> None:
        """Have all that was noted written."""
        try:
            if self._file is not None:
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()

    def _add(self, line: Line) -> None:
        try:
            if self._file is not None:
                self._file.write(encode_line(line) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the event log %s ends here: %s", self._path, error)
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # it tries to write once more before it closes
                file.close()


def open_to_add(path: Path) -> TextIO:
    """Open a log so that lines can be added to it. Raises `OSError`."""
    return path.open("a", encoding="ascii", buffering=_BLOCK_BYTES)


def _cut_last_line(path: Path) -> None:
    """Remove a last line without an end, which a scheduler that was killed has left."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            kept = file.read(end - begin).rfind(b"\n") + 1
            if kept:
                file.truncate(begin + kept)
                return
            end = begin
        file.truncate(0)


def replay(path: Path) -> tuple[int, str]:
    """Take the log in `path` to a core of its own.

    Returns the number of decisions that are equal and, where there is one, what is to be said of the first that is not. Raises `BrokenLog`
    when a line makes no sense; the message names file and line. Raises `OSError` when the file cannot be read.
    """
    again, number = Replay(), 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith("\n"):
                    raise BrokenLog("it is cut off")
                line = decode_line(text)
                out = again.take(line)
                if out is not None and isinstance(line, Handled):
                    return again.equal, f"{path}:{number}: the log has {encode_commands(line.commands)}, now it is {encode_commands(out)}"
    except UnicodeDecodeError as error:
        raise BrokenLog(f"{path}:{number + 1}: it is not UTF-8: {error.reason}") from None
    except TangramError as error:
        raise BrokenLog(f"{path}:{number}: {error}") from None
    if not number:
        raise BrokenLog(f"{path}: it is empty")
    return again.equal, ""


def main(words: Sequence[str] | None = None) -> int:
    """Replay a log and print what comes of it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m app.event_log", description="Take an event log to a fresh core and compare.")
    parser.add_argument("file", type=Path)
    path: Path = parser.parse_args(words).file
    try:
        equal, difference = replay(path)
    except (TangramError, OSError) as error:
        print(f"event log: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(difference or f"{equal} decisions, all equal")
    return EXIT_DIFFERS if difference else 0


if __name__ == "__main__":
    sys.exit(main())
