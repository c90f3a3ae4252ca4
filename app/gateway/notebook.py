"""Runs the cells of a notebook; sent to environments by `run_code.py`, with whatever Python 3.8 or newer the image has.

Arguments: a file with the cells, JSON list of texts; a file to which the result of each cell is added as a line of JSON; the seconds that
a cell may take, 0 for no limit; how many characters are kept of each thing that a cell gives. Where IPython can be imported, cells run in
it. Otherwise they are plain Python: no magics, and of a last expression its `repr`.

Cells run in a child process. What they print is read from its descriptors 1 and 2, so what their own child processes print is there too.
Where it ends before a cell has, by a crash in C for example, its last words are printed, and its exit code is that of the whole.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import queue
import secrets
import select
import signal
import sys
import threading
import traceback
from typing import Any, Callable, Dict, Iterator, List, Optional, TextIO, Tuple

Error = Optional[Dict[str, Any]]
Run = Callable[[str], Tuple[List[Dict[str, Any]], Error]]

LEFT_OUT = "\n[output is left out here]\n"

ALL_CELLS = 16
"""How many times as much is kept of all cells together: their results are read in one piece."""


class CellTimeout(BaseException):
    """Raised in a cell that runs for too long."""


def run_plain(cell: str, names: dict[str, Any]) -> tuple[list[dict[str, Any]], Error]:
    """Run a cell in `names`; return what it shows, and its error."""
    try:
        tree = ast.parse(cell, "<cell>")
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr):
            exec(compile(tree, "<cell>", "exec"), names)
            return [], None
        tree.body.pop()
        exec(compile(tree, "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        return ([] if value is None else [{"text/plain": repr(value)}]), None
    except (Exception, SystemExit, KeyboardInterrupt, CellTimeout) as error:
        lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next if error.__traceback__ else None)
        return [], {"ename": type(error).__name__, "evalue": str(error), "traceback": lines}


def plain_runner() -> Run:
    """Return what runs a cell in plain Python."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(cell: str) -> tuple[list[dict[str, Any]], Error]:
        return run_plain(cell, names)

    return run


def ipython_runner(interactive_shell: Any, capture_output: Any) -> Run:
    """Return what runs a cell in IPython."""
    shell = interactive_shell.instance()
    shell._showtraceback = lambda *_: None  # errors are results, not output
    values: list[object] = []
    shell.display_trap.hook = lambda value: None if value is None else values.append(value)

    def run(cell: str) -> tuple[list[dict[str, Any]], Error]:
        values.clear()
        with capture_output(stdout=False, stderr=False) as captured:
            result = shell.run_cell(cell)
            shown = [shell.display_formatter.format(value)[0] for value in values]
        shown = [dict(output.data) for output in captured.outputs] + shown
        error = result.error_before_exec or result.error_in_exec
        if error is None:
            return shown, None
        lines = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
        return shown, {"ename": type(error).__name__, "evalue": str(error), "traceback": lines}

    return run


def make_runner() -> Run:
    """Return what runs a cell and gives what it shows, and its error."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
        from IPython.utils.capture import capture_output
    except ImportError:
        return plain_runner()
    return ipython_runner(InteractiveShell, capture_output)


def flush(stream: TextIO) -> None:
    """Send on what a cell has printed. The cell may have closed the stream."""
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


class Printed:
    """What the process that runs cells, and those that it starts, print to a descriptor. What is too much is dropped."""

    def __init__(self, descriptor: int, most: int) -> None:
        """Keep somewhat more than the first and the last `most` characters of each cell."""
        self._descriptor, self._bytes = descriptor, 4 * (most + 1)
        self._source, self._sink = os.pipe()
        self._mark, self._texts = secrets.token_bytes(16), queue.SimpleQueue()  # type: ignore[var-annotated]

    def begin(self) -> TextIO:
        """Return the stream of the next cell, whatever the last one did to its own."""
        os.dup2(self._sink, self._descriptor)
        return open(self._descriptor, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)

    def end(self) -> None:
        """Note that what is printed from now on is the next cell's."""
        os.set_blocking(self._sink, True)
        os.write(self._sink, self._mark)

    def collect(self) -> None:
        """Begin to read, on a thread of the process that collects."""
        threading.Thread(target=self._read, daemon=True).start()

    def text(self) -> str:
        """Return what was printed up to the next end."""
        return bytes(self._texts.get()).decode("utf-8", "replace")

    def _read(self) -> None:
        first, last, rest = bytearray(), bytearray(), b""
        while True:
            rest += os.read(self._source, 1 << 16)
            while self._mark in rest:
                end, _, rest = rest.partition(self._mark)
                self._texts.put(first + last + end)
                first, last = bytearray(), bytearray()
            cut = max(0, len(rest) - len(self._mark))  # the mark may come in two parts
            room = min(cut, self._bytes - len(first))
            first += rest[:room]
            last += rest[room:cut]
            del last[: -self._bytes]
            rest = rest[cut:]


class Kept:
    """Bounds what is kept of the results of cells, in characters."""

    def __init__(self, most: int) -> None:
        """Keep up to `most` of each thing, and `ALL_CELLS` times that in all."""
        self._most, self._left, self._dropped = most, ALL_CELLS * most, False

    def result(self, stdout: str, stderr: str, shown: list[dict[str, Any]], error: Error) -> dict[str, Any]:
        """Return the result of a cell; an error is always there, and `dropped` says whether something is not."""
        self._dropped = False
        errors = []
        if error is not None:
            errors = [
                {"ename": self._text(error["ename"]), "evalue": self._text(error["evalue"]), "traceback": self._list(error["traceback"])}
            ]
        result = {"stdout": self._text(stdout), "stderr": self._text(stderr), "display": self._list(shown), "error": errors}
        return {**result, "dropped": self._dropped}

    def _text(self, text: str) -> str:
        room = min(self._most, self._left)
        is_whole = len(text) <= room
        if not is_whole:
            half = max(0, room - len(LEFT_OUT)) // 2
            text = text[:half] + LEFT_OUT + text[-half:] if half else text[:room]
        self._note(len(text), whole=is_whole)
        return text

    def _list(self, things: list[Any]) -> list[Any]:
        """Return the first of some things; each is there as a whole, as half a picture is none."""
        kept, room = [], min(self._most, self._left)
        for thing in things:
            room -= len(json.dumps(thing, default=repr))
            if room < 0:
                break
            kept.append(thing)
        self._note(len(json.dumps(kept, default=repr)), whole=len(kept) == len(things))
        return kept

    def _note(self, length: int, *, whole: bool) -> None:
        self._left = max(0, self._left - length)
        self._dropped = self._dropped or not whole


def run_cells(cells: list[str], out: Printed, err: Printed, told: int, cell_timeout_s: float) -> int:
    """Run all cells, tell what each shows and its error as a line, and return the exit code of the process.

    One that fails does not stop those after it, one that runs out of time does.
    """

    def out_of_time(_number: int, _frame: object) -> None:
        raise CellTimeout(f"the cell ran for more than {cell_timeout_s:g} s")

    signal.signal(signal.SIGALRM, out_of_time)
    process, run = os.getpid(), make_runner()
    sys.path[0] = os.getcwd()  # as in Jupyter, from here on: modules of the cells' folder must not take the place of those above
    for cell in cells:
        sys.stdout, sys.stderr = streams = out.begin(), err.begin()
        signal.setitimer(signal.ITIMER_REAL, cell_timeout_s)
        shown, error = run(cell)
        for stream in streams:
            flush(stream)
        if os.getpid() != process:  # a child process of the cell, which has come to its end
            os._exit(0 if error is None else 1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.end()
        err.end()
        with open(told, "w", encoding="ascii", closefd=False) as line:
            line.write(json.dumps([shown, error], default=repr) + "\n")
        if error and error["ename"] == "CellTimeout":
            return 124
    return 0


def lines_of(told: int, process: int) -> Iterator[bytes]:
    """Yield the lines that a process tells, until it has ended. What it has started may hold the descriptor for longer."""
    rest, has_ended, sources = b"", False, [told]
    os.set_blocking(told, False)
    while not has_ended:
        has_ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        select.select(sources, [], [], 0 if has_ended else 0.05)
        with contextlib.suppress(BlockingIOError):
            while part := os.read(told, 1 << 16):
                *lines, rest = (rest + part).split(b"\n")
                yield from lines
            sources = []  # nobody has it any more


def main(cells_file: str, results_file: str, cell_timeout_s: float, most: int) -> None:
    """Run all cells in a child process, which they may end in any way, and write down their results."""
    with open(cells_file, encoding="utf-8") as source:
        cells = json.load(source)
    out, err, kept = Printed(1, most), Printed(2, most), Kept(most)
    told, tells = os.pipe()
    # Opened before the first cell begins, which may remove it. Half of a surrogate pair has no form in UTF-8.
    with open(results_file, "a", encoding="utf-8", errors="replace") as results:
        child = os.fork()
        if child == 0:
            results.close()
            sys.exit(run_cells(cells, out, err, tells, cell_timeout_s))
        os.close(tells)
        out.collect()
        err.collect()
        for line in lines_of(told, child):
            try:
                shown, error = json.loads(line)
            except (TypeError, ValueError):  # a cell has written it
                continue
            results.write(json.dumps(kept.result(out.text(), err.text(), shown, error), ensure_ascii=False) + "\n")
            results.flush()
    for printed, stream in ((out, sys.stdout), (err, sys.stderr)):  # its last words
        printed.end()
        stream.write(printed.text())
    sys.stdout.flush()
    status = os.waitpid(child, 0)[1]
    sys.exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
