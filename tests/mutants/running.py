"""Applies defects to copies of the tree, one at a time, and runs the test of each.

| result | means |
|---|---|
| killed | the test fails |
| survived | the test passes although the defect is there |
| out of date | the text that the defect replaces is not in its file, or stands there more than once |
| broken | the file does not compile with the defect, or the test could not be run |

The tree itself is never written. Every worker has a copy of what git tracks, as it stands in the tree now. Python writes no
compiled files while a defect is in place: they would be taken for those of the file without it.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

FAILED = 1
"""What pytest exits with if a test ran and failed. Other codes say that none ran."""

LONGEST_S = 240.0
"""After so long a test counts as one that could not be run: it is to fail, and not to hang."""

Result = Literal["killed", "survived", "out of date", "broken"]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One defect: `new` instead of `old`, which stands once in `file`. `test` is the id of the test that fails by it, of that `layer`."""

    name: str
    file: str
    old: str
    new: str
    why: str
    test: str
    layer: int


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, after how long, and what the run of the test printed."""

    mutant: Mutant
    result: Result
    seconds: float = 0.0
    output: str = ""

    @property
    def problem(self) -> str:
        """The first line in which pytest says why the test failed."""
        return next((line[1:].strip() for line in self.output.splitlines() if line.startswith("E  ")), "")


def read(folder: Path, only: Iterable[str] = ()) -> list[Mutant]:
    """Return the mutants of all lists in a folder, or those whose names match one of the patterns in `only`."""
    mutants = [Mutant(**row) for path in sorted(folder.glob("*.toml")) for row in tomllib.loads(path.read_text())["mutant"]]
    patterns = list(only) or ["*"]
    return [mutant for mutant in mutants if any(fnmatchcase(mutant.name, pattern) for pattern in patterns)]


def copy_of(tree: Path, folder: Path) -> Path:
    """Copy what git tracks of a tree, as it stands there, into a folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in names:
        if name and (tree / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name, follow_symlinks=False)
    return folder


def run_tests(copy: Path, tests: Sequence[str], **variables: str) -> tuple[int, str]:
    """Run tests in a copy until one fails; return pytest's exit code, -1 if they took too long, and what it printed."""
    # The copy comes before the tree that the environment of this Python has installed, also in processes that tests start.
    env = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", **variables}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(words, cwd=copy, env=env, timeout=LONGEST_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except subprocess.TimeoutExpired:
        return -1, f"no end after {LONGEST_S:g} s"
    return done.returncode, done.stdout


def try_out(mutant: Mutant, copy: Path) -> Outcome:
    """Apply a mutant to a copy, run its test there, and restore the file."""
    path, began = copy / mutant.file, time.perf_counter()
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (count := before.count(mutant.old)) != 1:
        return Outcome(mutant, "out of date", output=f"the text stands {count} times in {mutant.file}, not once:\n{mutant.old}")
    after = before.replace(mutant.old, mutant.new)
    try:
        if path.suffix == ".py":
            compile(after, mutant.file, "exec")
    except SyntaxError as error:
        return Outcome(mutant, "broken", output=f"{mutant.file} does not compile with it: {error}")
    try:
        path.write_text(after, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        code, output = run_tests(copy, [mutant.test], PYTHONDONTWRITEBYTECODE="1")
    finally:
        path.write_text(before, encoding="utf-8")
    result: Result = "killed" if code == FAILED else "survived" if code == 0 else "broken"
    return Outcome(mutant, result, time.perf_counter() - began, output)


def try_all(mutants: Sequence[Mutant], tree: Path, workers: int, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Try out mutants of a tree on several copies at once; `tell` hears of each as soon as it is done.

    Raises `RuntimeError` unless their tests pass without any of them.
    """
    telling = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="tangram-mutants-") as folder:
        copies = queue.SimpleQueue[Path]()
        for number in range(workers):
            copies.put(copy_of(tree, Path(folder, str(number))))

        def sound(tests: Sequence[str]) -> tuple[int, str]:
            copy = copies.get()
            try:
                return run_tests(copy, tests)
            finally:
                copies.put(copy)

        def one(mutant: Mutant) -> Outcome:
            copy = copies.get()
            try:
                outcome = try_out(mutant, copy)
            finally:
                copies.put(copy)
            with telling:
                tell(outcome)
            return outcome

        tests = sorted({mutant.test for mutant in mutants})
        with ThreadPoolExecutor(workers) as pool:
            for code, output in pool.map(sound, [part for start in range(workers) if (part := tests[start::workers])]):
                if code:
                    raise RuntimeError(f"without any mutant, the tests do not pass:\n{output}")
            return list(pool.map(one, mutants))
