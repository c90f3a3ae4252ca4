"""What each constant of `elastic` on cores is worth, simulated: `python -m bench.tuning --trace FILE`.

Each constant of `scheduler/cpu/tuning.py` is halved and doubled, or set to what is given here, with all others as they are. Printed is
the mean ACT in cases of `bench.shortage` as a change against the constants as they are: the median over seeds, and the range.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from statistics import median

from bench.shortage import Run, carry_out
from bench.shortage_cases import Case, Recording, all_cases
from scheduler.cpu.marginal import steps_of
from scheduler.cpu.tuning import TUNING

CASES = ("rollouts-64-8", "coding-0.25")

VALUES: dict[str, tuple[float, float]] = {
    "better": (1.0, 2.0),
    "gain_ratio": (1.0, 2.0),
    "width_charge": (1.0, 1.2),
}
"""Values other than half of a constant and twice of it."""


def measure(name: str, value: float, cases: Sequence[Case], seeds: Sequence[int], recording: Recording) -> list[float]:
    """Return the mean ACT of each case and seed with a constant at a value.

    What is memoised from the constants is forgotten before and after.
    """
    before = getattr(TUNING, name)
    object.__setattr__(TUNING, name, type(before)(value))
    steps_of.cache_clear()
    try:
        return [
            carry_out(Run(case=case, policy="elastic", without=(), seed=seed, recording=recording)).mean_act
            for case in cases
            for seed in seeds
        ]
    finally:
        object.__setattr__(TUNING, name, before)
        steps_of.cache_clear()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.tuning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="recorded rollouts; by default the bundled ones")
    parser.add_argument("--only", action="append", metavar="CONSTANT", help="by default all")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="by default %(default)s")
    options = parser.parse_args(argv)
    there = {case.name: case for case in all_cases()}
    cases = [there[name] for name in CASES]
    seeds, recording = range(options.seeds), Recording(options.trace, "all")
    print("| constant | value | " + " | ".join(case.name for case in cases) + " |")
    print("|---|---:|" + "---:|" * len(cases))
    usual = measure("better", TUNING.better, cases, seeds, recording)
    for field in fields(TUNING):
        if options.only and field.name not in options.only:
            continue
        now = getattr(TUNING, field.name)
        for value in VALUES.get(field.name, (now / 2, now * 2)):
            found = measure(field.name, value, cases, seeds, recording)
            ratios = [new / old - 1.0 for new, old in zip(found, usual, strict=True)]
            per_case = [ratios[at : at + len(seeds)] for at in range(0, len(ratios), len(seeds))]
            cells = (f"{100 * median(each):+.1f} % ({100 * min(each):+.1f} to {100 * max(each):+.1f})" for each in per_case)
            print(f"| `{field.name}` | {value:g} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
