"""Runs the test suite on several processes: `python3 runtests.py [--jobs N] [NAME…]`, e.g. `test_slug`.

Exits 1 when a test fails and 2 when there is none to run.
"""

from __future__ import annotations

import argparse
import io
import sys
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path

from textkit.parallel import default_jobs, map_parts

HERE = Path(__file__).resolve().parent


def test_names(wanted: Sequence[str]) -> list[str]:
    """Give the dotted names of all tests, or of those whose name holds one of `wanted`; exit 1 if a module is broken."""
    loader = unittest.TestLoader()
    suite = loader.discover(str(HERE / "tests"), top_level_dir=str(HERE))
    if loader.errors:
        sys.exit("".join(loader.errors))
    names = [case.id() for case in _cases(suite)]
    return [name for name in names if not wanted or any(each in name for each in wanted)]


def run(names: Sequence[str]) -> tuple[int, str]:
    """Run the named tests; give the number that failed and what they said."""
    said = io.StringIO()
    result = unittest.TextTestRunner(said, verbosity=0).run(unittest.defaultTestLoader.loadTestsFromNames(names))
    failed = len(result.failures) + len(result.errors)
    return failed, said.getvalue() if failed else ""


def _cases(suite: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    if isinstance(suite, unittest.TestCase):
        yield suite
        return
    for each in suite:
        yield from _cases(each)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description="run the test suite")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    sys.path.insert(0, str(HERE))
    names = test_names(asked.names)
    if not names:
        print("no test of that name", file=sys.stderr)
        sys.exit(2)
    parts = map_parts(run, names, asked.jobs)
    failed = sum(count for count, _ in parts)
    print("".join(text for _, text in parts), end="")
    print(f"{len(names)} tests, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
