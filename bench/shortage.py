"""Policies where resources are short, simulated over several seeds: `make bench-shortage`, or `python -m bench.shortage`.

The cases are those of `bench.shortage_cases`. Each runs under every policy and from every seed; shown are medians over the seeds,
for mean ACT and step duration with the range. Everything is virtual time but the microseconds of a decision and the wall time.

`--trace FILE` names recorded rollouts (`tangram.trace/1`); by default they are the bundled ones. `--half` takes every second
trajectory of them. Parameters that were tuned on one half should be reported on the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from app.replay.replay_command import simulate
from bench.shortage_cases import FAMILIES, HALVES, Case, Recording, all_cases
from bench.spread import Spread
from bench.tools import Parser
from scheduler.policies import make_policy
from scheduler.sim.summary import act_figures, summarise
from tangram.errors import TangramError

OURS = "elastic"


class Unusable(TangramError, ValueError):
    """Raised when an option leads to nothing that can be run; says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One simulation to be done."""

    case: Case
    policy: str
    without: tuple[str, ...]
    seed: int
    recording: Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one simulation came to. Seconds, microseconds where the name says `us`; only decisions and `wall_s` are real time."""

    actions: int
    failed: int
    mean_act: float
    p50_act: float
    p95_act: float
    p99_act: float
    floor_act: float
    step_duration: float
    cpu_utilisation: float
    resizes_per_action: float
    decision_us_p50: float
    decision_us_p99: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case under a policy: the figures by seed and their spreads.

    `act_ratio` and `step_ratio` are mean ACT and step duration as multiples of those of `elastic` from the same seed; None where
    `elastic` was not run.
    """

    case: str
    title: str
    policy: str
    seeds: dict[int, Figures]
    spreads: dict[str, Spread]
    act_ratio: Spread | None
    step_ratio: Spread | None


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print, and return the exit status."""
    options = _arguments(argv)
    try:
        runs = _runs(options)
        rows = _rows(runs, options.jobs, shown=not options.json)
    except TangramError as error:
        print(f"bench.shortage: {error}", file=sys.stderr)
        return 2
    if options.json:
        chosen = {"trace": str(options.trace or "bundled"), "half": options.half, "seeds": options.seeds, "without": options.without}
        print(json.dumps({**chosen, "rows": [asdict(row) for row in rows]}, indent=2))
    return 0


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.shortage", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ", ".join(FAMILIES)
    parser.add_argument("--only", type=_words, default=[], metavar="NAME,…", help=f"cases, by name or by its front: {kinds}")
    parser.add_argument("--policies", type=_words, default=["fcfs", OURS], metavar="NAME,…", help="by default fcfs,elastic")
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], metavar="N,…", help="by default 0,1,2")
    parser.add_argument("--without", type=_words, default=[], metavar="PART,…", help=f"parts that `{OURS}` goes without")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="recorded rollouts; by default the bundled ones")
    parser.add_argument("--half", choices=HALVES, default="all", help="of the recorded rollouts: 1st, 3rd … or 2nd, 4th …")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at a time (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args(argv)


def _runs(options: argparse.Namespace) -> list[Run]:
    """Return what is to be simulated: each case under each policy from each seed, in this order."""
    for name, given in (("--policies", options.policies), ("--seeds", options.seeds)):
        if not given or len(set(given)) != len(given):
            raise Unusable(f"{name}: must name at least one, and none twice")
    if options.jobs < 1:
        raise Unusable(f"--jobs: must be at least 1, not {options.jobs}")
    if options.without and OURS not in options.policies:
        raise Unusable(f"--without: only {OURS} has parts to go without")
    without = {policy: tuple(options.without) if policy == OURS else () for policy in options.policies}
    for policy, parts in without.items():
        make_policy(policy, without=parts)
    cases = all_cases()
    for name in options.only:
        if not any(name in (case.name, case.family) for case in cases):
            raise Unusable(f"--only: no case {name!r}; there are {', '.join(case.name for case in cases)}")
    chosen = [case for case in cases if not options.only or case.name in options.only or case.family in options.only]
    recording = Recording(options.trace, options.half)
    if any(case.family in ("rollouts", "waiting") for case in chosen) and not recording.read().trajectories:
        raise Unusable(f"--trace: there is no trajectory in its {options.half} half")
    return [
        Run(case=case, policy=policy, without=without[policy], seed=seed, recording=recording)
        for case in chosen
        for policy in options.policies
        for seed in options.seeds
    ]


def carry_out(run: Run) -> Figures:
    """Simulate once."""
    began = time.perf_counter()
    options = replace(run.case.options, policy=run.policy, without=run.without, seed=run.seed)
    record = simulate(run.case.trace(run.recording, run.seed), options)
    wall_s = time.perf_counter() - began
    judged = [action for action in record.actions if run.case.job in (None, action.job)]
    figures = summarise(record) | act_figures(judged) | {"wall_s": wall_s}
    figures["floor_act"] = sum(action.floor_s for action in judged) / max(1, len(judged))
    figures["resizes_per_action"] = record.resizes / max(1, len(record.actions))
    return Figures(**{field.name: figures[field.name] for field in fields(Figures)})


def _carried_out(runs: Sequence[Run], processes: int) -> Iterator[Figures]:
    """Give the figures of every run, in order, as they come."""
    if processes == 1:
        yield from map(carry_out, runs)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield from pool.map(carry_out, runs)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _rows(runs: Sequence[Run], processes: int, *, shown: bool) -> list[Row]:
    """Simulate everything, a table per case, printed where `shown`."""
    rows: list[Row] = []
    by_policy: dict[str, dict[int, Figures]] = {}
    carried_out = _carried_out(runs, processes)
    for number, (run, figures) in enumerate(zip(runs, carried_out, strict=True), 1):
        by_policy.setdefault(run.policy, {})[run.seed] = figures
        where = f"[{number}/{len(runs)}] {run.case.name}, {run.policy}, seed {run.seed}"
        print(f"{where}: mean ACT {figures.mean_act:.3f} s, {figures.wall_s:.1f} s", file=sys.stderr, flush=True)
        if number == len(runs) or runs[number].case is not run.case:
            found = [_row(run.case, policy, by_policy) for policy in by_policy]
            if shown:
                print(table(found), flush=True)
            rows += found
            by_policy = {}
    return rows


def _row(case: Case, policy: str, by_policy: dict[str, dict[int, Figures]]) -> Row:
    seeds, ours = by_policy[policy], by_policy.get(OURS)
    names = [field.name for field in fields(Figures)]
    return Row(
        case=case.name,
        title=case.title,
        policy=policy,
        seeds=seeds,
        spreads={name: Spread.of([getattr(each, name) for each in seeds.values()]) for name in names},
        act_ratio=Spread.of([seeds[seed].mean_act / ours[seed].mean_act for seed in seeds]) if ours else None,
        step_ratio=Spread.of([seeds[seed].step_duration / ours[seed].step_duration for seed in seeds]) if ours else None,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the table of one case: seconds, medians over the seeds, ranges in brackets."""
    columns = f"{'mean ACT':>24}{'×':>6}{'p50':>8}{'p95':>8}{'p99':>8}{'step':>24}{'×':>6}"
    lines = [f"\n{rows[0].case}: {rows[0].title}", f"{'':10}{columns}{'resizes':>9}{'failed':>8}{'decision µs':>13}{'wall':>7}"]
    for row in rows:
        middle = {name: spread.median for name, spread in row.spreads.items()}
        decision = f"{middle['decision_us_p50']:.0f}/{middle['decision_us_p99']:.0f}"
        lines.append(
            f"{row.policy:10}{row.spreads['mean_act'].text(3):>24}{_ratio(row.act_ratio):>6}"
            f"{middle['p50_act']:>8.3f}{middle['p95_act']:>8.2f}{middle['p99_act']:>8.2f}"
            f"{row.spreads['step_duration'].text(1):>24}{_ratio(row.step_ratio):>6}"
            f"{middle['resizes_per_action']:>9.2f}{row.spreads['failed'].most:>8.0f}{decision:>13}{middle['wall_s']:>7.1f}"
        )
    return "\n".join(lines)


def _ratio(ratio: Spread | None) -> str:
    return "" if ratio is None else f"{ratio.median:.2f}"


if __name__ == "__main__":
    sys.exit(main())
