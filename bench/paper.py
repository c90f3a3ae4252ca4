"""The paper's experiments, simulated: `make bench-paper`, or `python -m bench.paper`.

One run simulates every case of `bench.paper_plan` in a pool of processes and writes one document with its plots. Whole
runs write to `docs/benchmarks.md`; partial ones (`--quick`, `--only`) elsewhere, unless `--out` says so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from app.replay.trace_lines import TraceError
from app.replay.traces import read_trace
from bench.paper_cases import Case, Outcome, run_case
from bench.paper_document import Origin, write_document
from bench.paper_plan import FULL, QUICK, Section, plan, shape
from bench.tools import Parser

ROOT = Path(__file__).resolve().parents[1]
WHOLE_OUT = Path("docs/benchmarks.md")
PARTIAL_OUT = Path(".tangram/bench/benchmarks.md")
ROLLOUTS = ROOT.parent / "shared" / "rollouts" / "agentcgroup.jsonl"
"""Recorded rollouts that must not be part of this repository, where they lie beside it."""

SECTIONS = ("calibration", "ai-coding", "batch", "cores", "deepsearch", "mopd", "mixed", "rollouts", "ablation")
DEFAULT_SEED = 1


class Unusable(ValueError):
    """Raised when an option leads to nothing that can be run; says which."""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, write the document, and return the exit status."""
    options = _arguments(argv)
    try:
        sections, out = _chosen(options)
    except (TraceError, Unusable) as error:
        print(f"bench.paper: {error}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    cases = _distinct_cases(sections)
    outcomes = _simulated(cases, options.processes)
    origin = Origin(
        command=_command(options),
        seed=options.seed,
        quick=options.quick,
        cases=len(cases),
        processes=options.processes,
        wall_s=time.perf_counter() - began,
    )
    write_document(out, sections, outcomes, origin)
    print(f"written to {out}", file=sys.stderr)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fortieth of trajectories and cores: shows that it works, and little else")
    parser.add_argument("--out", type=Path, help=f"the document; its plots go to a folder of that name (default {WHOLE_OUT})")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="what the workloads are drawn from (default %(default)s)")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="NAME", help=f"one section; repeat for more: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--rollouts", type=Path, metavar="FILE", help="a trace of recorded rollouts")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time (default %(default)s)")
    return parser.parse_args(argv)


def _chosen(options: argparse.Namespace) -> tuple[list[Section], Path]:
    if options.processes < 1:
        raise Unusable(f"--processes: must be at least 1, not {options.processes}")
    out: Path = options.out or (PARTIAL_OUT if options.quick or options.only else WHOLE_OUT)
    if out.is_dir() or not out.suffix:
        raise Unusable(f"--out: must name a file with a suffix, like benchmarks.md, not {out}")
    rollouts: Path | None = options.rollouts or (ROLLOUTS if ROLLOUTS.exists() else None)
    if rollouts is not None:
        read_trace(rollouts)
    wanted = options.only or SECTIONS
    sections = {section.name: section for section in plan(QUICK if options.quick else FULL, options.seed, rollouts)}
    return [sections[name] for name in SECTIONS if name in wanted], out


def _command(options: argparse.Namespace) -> str:
    words = ["python", "-m", "bench.paper", "--seed", str(options.seed), "--processes", str(options.processes)]
    words += ["--quick"] if options.quick else []
    for name in options.only or ():
        words += ["--only", name]
    words += ["--rollouts", str(options.rollouts)] if options.rollouts else []
    words += ["--out", str(options.out)] if options.out else []
    return shlex.join(words)


def _distinct_cases(sections: Sequence[Section]) -> list[Case]:
    """Return each case once, those of one trace together and the largest traces first."""
    cases = dict.fromkeys(entry.case for section in sections for table in section.tables for entry in table.entries)
    return sorted(cases, key=lambda case: (-case.trajectories, case.workload))


def _simulated(cases: Sequence[Case], processes: int) -> dict[Case, Outcome]:
    """Run all cases, a line of progress each. The first that fails ends the run."""
    outcomes: dict[Case, Outcome] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run_case, case): case for case in cases}
        try:
            for future in as_completed(waiting):
                case = waiting[future]
                outcomes[case] = future.result()
                _progress(len(outcomes), len(cases), case, outcomes[case])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return outcomes


def _progress(done: int, of: int, case: Case, outcome: Outcome) -> None:
    without = "".join(f" without {part}" for part in case.without)
    what = f"{case.workload}, {case.trajectories} on {shape(case.cluster)}, {case.policy}{without}"
    print(f"[{done}/{of}] {what}: mean ACT {outcome.mean_act:.3f} s, {outcome.wall_s:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
