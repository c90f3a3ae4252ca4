"""Run the compatibility matrix: see the package's page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.clients.environments import ENVIRONMENTS
from tests.clients.page import document, page, print_table, summary
from tests.clients.rows import rows
from tests.clients.running import run


def main() -> int:
    """Run rows, print them, and return 1 where one was not shown."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description="Run other systems' clients and say how they go here.")
    parser.add_argument("environments", nargs="*", metavar="ENVIRONMENT", help=f"only these: {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quiet", action="store_true", help="print only what was not shown, and the counts")
    parser.add_argument("-o", "--out", type=Path, help="write the page docs/compatibility.md there, if all rows were shown")
    options = parser.parse_args()
    if unknown := set(options.environments) - set(ENVIRONMENTS):
        parser.error(f"no environment is called {', '.join(sorted(unknown))}")
    if options.out and options.environments:
        parser.error("a page has all environments: name none with -o")
    shown = run(rows(), options.environments or ENVIRONMENTS)
    if options.json:
        print(document(shown))
    elif not options.quiet:
        print_table(shown)
    print(summary(shown), file=sys.stderr if options.json else sys.stdout)
    if options.out and all(one.state == "shown" for one in shown):
        options.out.write_text(page(rows()), encoding="utf-8")
    elif options.out:
        print(f"{options.out} was not written: not every row was shown", file=sys.stderr)
        return 1
    return int(any(one.state == "failed" for one in shown))


if __name__ == "__main__":
    sys.exit(main())
