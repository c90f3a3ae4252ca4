"""Measures figures, prints each beside its last values, and says which ones moved.

`python -m bench.figures [NAME …] [--json] [--history FILE]`. The exit code is 0, whatever the values are; 1 if a figure could not be
measured, with one line for each of these; 2 for a wrong word. What was measured is kept even if a later figure fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.figures import history
from bench.figures.registry import Figure, all_figures, pick

HISTORY = Path(".figures/history.jsonl")


def main(arguments: Sequence[str] | None = None, figures: Sequence[Figure] | None = None) -> int:
    """Measure `figures`, by default all that there are, and print them."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures to measure (all)")
    parser.add_argument("--history", type=Path, default=HISTORY, help=f"file of earlier values ({HISTORY})")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    chosen = all_figures() if figures is None else tuple(figures)
    try:
        chosen = pick(chosen, options.names) if options.names else chosen
        earlier = history.read(options.history)
    except (LookupError, history.HistoryError) as error:
        print(f"bench.figures: {error}", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    if load > 0.5:
        _note(f"the machine is not quiet: its load is {load:.1f} on {os.cpu_count()} cores")
    measured, failed = [], []
    for number, one in enumerate(chosen, 1):
        _progress(f"{number} of {len(chosen)}: {one.name}, {one.meaning}")
        with redirect_stdout(sys.stderr):  # clients of other systems print
            row = _measure(one, earlier.get(one.name, []))
        _progress("")
        if "reason" in row:
            failed.append(row)
            _note(f"not measured: {row['name']}: {row['reason']}")
            continue
        measured.append(row)
        entry = {"name": one.name, "unit": one.unit, "value": row["value"], "at": _now(), "commit": _commit(), "load": round(load, 2)}
        history.add(options.history, history.Entry(**entry))
        if not options.json:
            print(line(row), flush=True)
    moved = [row["name"] for row in measured if row["moved"]]
    if options.json:
        print(json.dumps({"figures": measured, "moved": moved, "not_measured": failed, "load": load, "cores": os.cpu_count()}, indent=2))
    else:
        print(f"moved: {', '.join(moved)}" if moved else f"none of {len(measured)} has moved")
    return 1 if failed else 0


def _measure(one: Figure, earlier: list[float]) -> dict[str, Any]:
    """Measure a figure; return it beside its earlier values, or the reason why it could not be measured."""
    began = time.monotonic()
    try:
        value = float(one.measure())
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        return {"name": one.name, "reason": f"{type(error).__name__}: {reason}"[:300]}
    return {
        "name": one.name,
        "meaning": one.meaning,
        "unit": one.unit,
        "value": value,
        "earlier": earlier,
        "median": median(earlier) if earlier else None,
        "moved": history.moved(value, earlier),
        "words": history.words(value, earlier),
        "took_s": round(time.monotonic() - began, 2),
    }


def line(row: dict[str, Any]) -> str:
    """Return a figure for a person: its value, how it stands to the last ones, and these."""
    last = f" (last: {history.short(row['earlier'])})" if row["earlier"] else ""
    return f"{row['name']:32}{history.short([row['value']]):>9} {row['unit']:12} {row['words']}{last}"


def _progress(text: str) -> None:
    """Show what is being measured, on a terminal only; the next line overwrites it."""
    if sys.stderr.isatty():
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)


def _note(text: str) -> None:
    print(f"bench.figures: {text}", file=sys.stderr, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _commit() -> str:
    """Return the commit of this tree, empty where git says nothing."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
