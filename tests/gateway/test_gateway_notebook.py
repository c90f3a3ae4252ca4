"""The program that runs cells, on its own: in plain Python, and in IPython where this Python has it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "app" / "gateway" / "notebook.py"
LEFT_OUT = "\n[output is left out here]\n"
IPYTHON = pytest.param((), marks=pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="IPython is not installed"))


@pytest.fixture(params=[("-S",), IPYTHON], ids=["plain", "ipython"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the options of the interpreter: without its site packages it has no IPython."""
    return tuple(request.param)


def ran(
    folder: Path, flags: tuple[str, ...], cells: list[str], cell_timeout_s: float = 0, most: int = 1000
) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run cells; return how the program ended, and the results of cells."""
    (folder / "cells").write_text(json.dumps(cells))
    argv = [sys.executable, *flags, str(NOTEBOOK), "cells", "results", str(cell_timeout_s), str(most)]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, env={"HOME": str(folder)})
    return done, [json.loads(line) for line in (folder / "results").read_text().splitlines()]


def results(folder: Path, flags: tuple[str, ...], cells: list[str], *limits: float) -> tuple[int, list[dict[str, Any]]]:
    """Run cells whose program itself prints nothing; return its exit code, and the results of cells."""
    done, found = ran(folder, flags, cells, *limits)
    assert (done.stdout, done.stderr) == ("", "")
    return done.returncode, found


def test_cells_share_names_and_each_has_its_own_output_last_expression_and_error(tmp_path: Path, flags: tuple[str, ...]) -> None:
    shown = ["a = 'x'", "a; a", "print(a)", "import sys\nprint('no', file=sys.stderr)", "None"]
    failing = ["print('so far'); 1 / 0", "1 +", "print('goes on')"]
    # Half of a surrogate pair, which is no text, is replaced
    halves = ["import sys; print('a' + chr(0xd800) + 'b')", "{chr(0xdc00): 1}"]
    code, cells = results(tmp_path, flags, [*shown, *failing, *halves])
    assert code == 0
    assert [cell["display"] for cell in cells[:5]] == [[], [{"text/plain": "'x'"}], [], [], []]
    assert [cell["stdout"] for cell in cells[:9]] == ["", "", "x\n", "", "", "so far\n", "", "goes on\n", "a?b\n"]
    assert [cell["stderr"] for cell in cells[:5]] == ["", "", "", "no\n", ""]
    errors = [[error["ename"] for error in cell["error"]] for cell in cells]
    assert errors == [[]] * 5 + [["ZeroDivisionError"], ["SyntaxError"]] + [[]] * 3
    assert any("ZeroDivisionError" in line for line in cells[5]["error"][0]["traceback"])


def test_what_the_child_processes_of_a_cell_print_is_in_its_output(tmp_path: Path, flags: tuple[str, ...]) -> None:
    cells = [
        "import os, subprocess, sys; print('a'); _ = subprocess.run(['echo', 'b']); _ = os.system('echo c; echo d >&2'); print('e')",
        "os.close(1); sys.stderr.close()",
        "_ = os.system('echo f')",
        "_ = os.system('head -c 100000000 /dev/zero; echo end')",
        "print('g')",
    ]
    code, done = results(tmp_path, flags, cells)
    assert code == 0
    assert [(cell["stdout"], cell["stderr"]) for cell in done[:3]] == [("a\nb\nc\ne\n", "d\n"), ("", ""), ("f\n", "")]
    assert done[3]["stdout"] == "\0" * 486 + LEFT_OUT + "\0" * 482 + "end\n"
    assert (done[3]["dropped"], done[4]["stdout"]) == (True, "g\n")
    assert not any(cell["error"] for cell in done)


@pytest.mark.parametrize(
    ("crash", "code", "words"),
    [
        (
            "import ctypes; ctypes.CDLL(None).puts(b'said in C'); ctypes.CDLL(None).fflush(None); ctypes.CDLL(None).abort()",
            134,
            "said in C",
        ),
        ("import os; os.write(1, b'said'); os._exit(3)", 3, "said"),
        ("import faulthandler, os; faulthandler.enable(); print('said'); os.kill(os.getpid(), 11)", 139, "said"),
    ],
)
def test_a_notebook_that_crashes_has_its_results_so_far_and_its_last_words(
    tmp_path: Path, flags: tuple[str, ...], crash: str, code: int, words: str
) -> None:
    done, cells = ran(tmp_path, flags, ["print('a')", f"import os; os.write(2, b'why'); {crash}", "print('b')"])
    assert (done.returncode, done.stdout.strip(), done.stderr[:3]) == (code, words, "why")
    assert ("Fatal Python error" in done.stderr) == ("faulthandler" in crash)
    assert [cell["stdout"] for cell in cells] == ["a\n"]


def test_a_child_process_that_comes_to_the_end_of_a_cell_ends_there(tmp_path: Path, flags: tuple[str, ...]) -> None:
    cells = [
        "import os\nprint('a')\nchild = os.fork()\nif child == 0: print('child', end='')\nelse: print(os.waitpid(child, 0)[1])",
        "print('b')",
    ]
    code, done = results(tmp_path, flags, cells)
    assert (code, [cell["stdout"] for cell in done]) == (0, ["a\nchild0\n", "b\n"])


def test_a_cell_that_is_out_of_time_ends_the_process(tmp_path: Path, flags: tuple[str, ...]) -> None:
    code, cells = results(tmp_path, flags, ["print(1)", "import time\nwhile True: time.sleep(0.01)", "print(3)"], 3)
    assert code == 124
    assert [cell["stdout"] for cell in cells] == ["1\n", ""]
    assert cells[1]["error"][0]["ename"] == "CellTimeout"


def test_of_what_cells_give_a_bounded_part_is_kept_and_always_that_there_was_an_error(tmp_path: Path, flags: tuple[str, ...]) -> None:
    many = ["print('x' * 99)", "'y' * 99", "raise ValueError('z' * 99)", *["print('w' * 50)"] * 40]
    code, cells = results(tmp_path, flags, many, 0, 50)
    assert (code, len(cells)) == (0, 43)
    assert [cell["dropped"] for cell in cells[:3]] == [True, True, True]
    assert (cells[0]["stdout"], cells[1]["display"], cells[2]["error"][0]["evalue"]) == (
        "x" * 11 + LEFT_OUT + "x" * 10 + "\n",
        [],
        "z" * 11 + LEFT_OUT + "z" * 11,
    )
    # Of all cells together there is a bound, too
    assert sum(len(cell["stdout"]) for cell in cells) <= 16 * 50 and cells[-1]["dropped"]
