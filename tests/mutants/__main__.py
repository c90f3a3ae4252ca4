"""`make mutants`: try all mutants, or those that ONLY names, and print what becomes of each."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from tests.mutants.running import Outcome, read, try_all

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main(only: list[str]) -> int:
    """Try the mutants whose names match; return 0 if each is killed, else 1."""
    mutants = read(HERE, only)
    if not mutants:
        print(f"no mutant has such a name: {' '.join(only)}", file=sys.stderr)
        return 1

    def tell(outcome: Outcome) -> None:
        print(f"{outcome.result:11}  {outcome.seconds:5.1f} s  {outcome.mutant.name}: {outcome.problem}"[:200], flush=True)
        if outcome.result != "killed":
            print(f"    {outcome.mutant.why}\n    {outcome.mutant.test}\n{outcome.output}", flush=True)

    workers = min(len(mutants), len(os.sched_getaffinity(0)))
    print(f"{len(mutants)} mutants on {workers} copies of the tree; their tests run once without any of them", flush=True)
    try:
        outcomes = try_all(mutants, ROOT, workers, tell)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    counts = Counter(outcome.result for outcome in outcomes)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 0 if set(counts) == {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
