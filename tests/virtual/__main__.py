"""`make chaos SEEDS=1000 FIRST=0`: many seeds on all cores.

Exits with 1 where a law is broken, after printing the shortest schedule that breaks it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

from tests.virtual.run import broken_laws, running
from tests.virtual.scenario import scenario
from tests.virtual.shrink import shortest

AT_ONCE = 10
"""Seeds that one process runs in a row."""
SHOWN = 3
"""How many failing seeds are made short; of all others the first broken law is printed."""


def main() -> int:
    """Run the seeds that the variables name."""
    count, first = int(os.environ.get("SEEDS", "1000")), int(os.environ.get("FIRST", "0"))
    began, failed = time.monotonic(), dict[int, list[str]]()
    for done, (seed, broken) in enumerate(_outcomes(range(first, first + count)), 1):
        if broken:
            failed[seed] = broken
            print(f"\nseed {seed}: {broken[0][:500]}", flush=True)
        if sys.stderr.isatty() or done == count:
            print(f"\r{done} of {count} seeds, {len(failed)} break a law, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    for seed in list(failed)[:SHOWN]:
        print(told(seed))
    print(f"{count - len(failed)} of {count} seeds keep every law; {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def told(seed: int) -> str:
    """Return what a person needs to know of a failing seed: the law, the shortest schedule, and how to run it again."""
    short, broken = shortest(scenario(seed), broken_laws)
    with running(short) as run:
        run.go()
        log = run.log
    return "\n".join(
        [
            f"\nseed {seed} breaks a law; again: make chaos SEEDS=1 FIRST={seed}",
            *(f"  {one[:1000]}" for one in broken[:3]),
            "  the shortest schedule that does:",
            f"    {replace(short, rollouts=(), faults=())} with",
            *(f"    {part}" for part in (*short.rollouts, *short.faults)),
            "  what happened:",
            *(f"    {line}" for line in log),
        ]
    )


def _outcomes(seeds: range) -> Iterable[tuple[int, list[str]]]:
    if len(seeds) <= AT_ONCE:
        yield from _some(seeds)
        return
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        parts = [seeds[start : start + AT_ONCE] for start in range(0, len(seeds), AT_ONCE)]
        for part in as_completed([pool.submit(_some, part) for part in parts]):
            yield from part.result()


def _some(seeds: Iterable[int]) -> list[tuple[int, list[str]]]:
    return [(seed, broken_laws(scenario(seed))) for seed in seeds]


if __name__ == "__main__":
    sys.exit(main())
