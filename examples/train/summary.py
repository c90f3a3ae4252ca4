"""What logs of `examples.train` show, as a table and a plot: `python -m examples.train.summary LOG… --plot train.svg`, in `.venv`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean, median

from bench.plots import Axes, lines


def main() -> None:
    """Print a row for each log and draw the rewards by step."""
    parser = argparse.ArgumentParser(prog="python -m examples.train.summary")
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, help="where to write the plot, an SVG file")
    options = parser.parse_args()
    logs = {path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in options.logs}
    print("| log | steps | reward, first tenth | last tenth | seconds a step | in sandboxes |\n|---|---|---|---|---|---|")
    for name, steps in logs.items():
        if not steps:
            parser.error(f"{name} has no step yet")
        rewards, tenth = [step["reward"] for step in steps], max(1, len(steps) // 10)
        times = " | ".join(f"{median(step[key] for step in steps):.2f}" for key in ("seconds", "sandbox_seconds"))
        print(f"| {name} | {len(steps)} | {fmean(rewards[:tenth]):.2f} | {fmean(rewards[-tenth:]):.2f} | {times} |")
    if options.plot:
        series = {name: [(step["step"], step["reward"]) for step in steps] for name, steps in logs.items()}
        lines(series, Axes(title="Reward of a tiny model, trained from scratch", x="step", y="mean reward of 32 rollouts"), options.plot)


if __name__ == "__main__":
    main()
