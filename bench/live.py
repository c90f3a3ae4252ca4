"""The same rollouts live on this machine under every system: mean ACT and step duration, compared in one run.

`python -m bench.live` replays the bundled rollouts, with the commands that were recorded, under `elastic`, under fixed
degrees of parallelism and under Ray. All have the same trajectories, arrivals, think times, files, variables and cores;
each replay has a stack of its own, started before and stopped afterwards. Rounds alternate, each in another order, so that
what the machine does meanwhile hits all. Think times are stretched by what the machine is slower than the recording
(`pace.py`), so that the load is the recorded one. The exit code is 0 only if `elastic` is first in both figures.

Systems: a policy of `tangram replay`, or `ray:N`, where every command is a Ray task with `num_cpus` = N.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from app.demo import BUNDLED
from app.replay import LiveResult, ReplayOptions, replay_live
from app.stack import cores_here
from bench.live_record import Act, MachineMeter, Replayed, metered
from bench.live_trace import Workload, add_options, words, workload_of
from bench.pace import measured_pace
from scheduler.policies import make_policy
from tangram.errors import TangramError
from tangram.settings import Settings

OURS = "elastic"
AMOUNTS = (1, 2, 4)
JUDGED = ("mean_act", "step_duration")
SHOWN = (*JUDGED, "p95_act", "p50_act", "mean_execution", "cpu_s", "machine_s")
LIMIT_S = 900.0
"""Longest time for one replay: a system that loses an action would be waited for in vain."""


class Refused(Exception):
    """Raised when the command line asks for what cannot be measured; says what in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 if `elastic` is first."""
    options = _parser().parse_args(arguments)
    try:
        systems = chosen_systems(options.policies, options.cores)
        workload = workload_of(options)
        if options.rounds < 1 or not 0 < options.speed < inf or not 0 < workload.pace < inf:
            raise Refused("--rounds must be at least 1, --speed and --pace above 0")
        workload.trace()
        if options.pace is None:
            workload = replace(workload, pace=measured_pace(options.cores))
            print(f"commands take {workload.pace:.2f} times as long as recorded, so does thinking", file=sys.stderr, flush=True)
        rounds = measure(systems, workload, options.cores, options.rounds)
    except (Refused, TangramError) as error:
        print(f"bench.live: {error}", file=sys.stderr)
        return 2
    document = compare(rounds) | {"workload": asdict(workload), "cores": options.cores}
    print(json.dumps(document, indent=2) if options.json else text(document))
    return 0 if document["first"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.live", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="replays of each system")
    parser.add_argument("--policies", default="", help="systems to compare, with commas: elastic,fixed:1,ray:2 …")
    parser.add_argument("--cores", type=int, default=cores_here(), help="cores that each system may use")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_options(parser)
    return parser


def chosen_systems(said: str, cores: int) -> list[str]:
    """Return the systems to compare, `elastic` among them; by default all amounts that the machine can tell apart.

    Raises
    ------
    Refused
        When there is no such system, or Ray is wanted and not installed.

    """
    amounts = [amount for amount in AMOUNTS if amount <= cores]
    usual = [OURS, *(f"fixed:{amount}" for amount in amounts), *(f"ray:{amount}" for amount in amounts)]
    systems = list(dict.fromkeys([OURS, *said.split(",")])) if said else usual
    for system in systems:
        kind, _, amount = system.partition(":")
        if kind != "ray":
            make_policy(system)
        elif not amount.isascii() or not amount.isdigit() or int(amount) < 1:
            raise Refused(f"no system {system!r}: Ray's are ray:1, ray:2 …")
        elif importlib.util.find_spec("ray") is None:
            raise Refused("ray is not installed: install the extra `compare`, or name other systems with --policies")
    return systems


def measure(systems: Sequence[str], workload: Workload, cores: int, rounds: int) -> list[list[Replayed]]:
    """Replay every system once a round; a round begins with another system each time."""
    found = []
    for number in range(rounds):
        turn = number % len(systems)
        found.append([_replay(system, workload, cores, number) for system in (*systems[turn:], *systems[:turn])])
    return found


def _replay(system: str, workload: Workload, cores: int, number: int) -> Replayed:
    replayed = _under_ray(system, workload, cores) if system.startswith("ray:") else _under_tangram(system, workload, cores)
    line = f"mean ACT {replayed.mean_act:.3f} s, step {replayed.step_duration:.2f} s, {replayed.failed} of {replayed.actions} failed"
    print(f"round {number + 1}, {system}: {line}", file=sys.stderr, flush=True)
    return replayed


def _under_tangram(policy: str, workload: Workload, cores: int) -> Replayed:
    """Replay as `tangram replay --live` does, on a stack of its own."""
    meters: list[MachineMeter] = []
    urls = {"broker_url": None, "result_url": None, "database_url": None, "services_file": None}
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder, _time_limit(policy):
        settings = Settings().model_copy(update={**urls, "state_dir": Path(folder)})
        options = ReplayOptions(policy=policy, cores=cores, gpus=0, speed=workload.think_divisor)
        result = replay_live(workload.trace(), BUNDLED, options, settings, metered(meters), lambda line: None)
    return _of_live(policy, result, meters[-1].used_s)


@contextmanager
def _time_limit(system: str) -> Iterator[None]:
    """Raise `TangramError` in the main thread, which is this one, after `LIMIT_S`."""

    def refuse(*_: object) -> None:
        raise _too_long(system)

    before = signal.signal(signal.SIGALRM, refuse)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _too_long(system: str) -> TangramError:
    return TangramError(f"{system} had not ended after {LIMIT_S:g} s")


def _of_live(policy: str, result: LiveResult, machine_s: float) -> Replayed:
    run = result.record
    acts = [
        Act(act_s=each.act_s, execution_s=each.execution_s, cpu_s=each.cpu_s, succeeded=each.status == "succeeded") for each in run.actions
    ]
    return Replayed.of(policy, acts, run.last_result_s - run.first_arrival_s, machine_s, run.resizes)


def _under_ray(system: str, workload: Workload, cores: int) -> Replayed:
    """Replay in a process of its own, since Ray can be set up only once in each."""
    argv = [sys.executable, "-m", "bench.ray_replay", system.partition(":")[2], "--cores", str(cores), *words(workload)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise _too_long(system) from None
    if done.returncode != 0:
        raise TangramError(f"{system} ended with {done.returncode}:\n{done.stderr.strip()}")
    return Replayed(**json.loads(done.stdout.splitlines()[-1]))


def compare(rounds: Sequence[Sequence[Replayed]]) -> dict[str, Any]:
    """Return per system the median, least and most of each figure over the rounds, ratios to `elastic`, and the verdict."""
    by_system: dict[str, list[Replayed]] = {}
    for replayed in (each for done in rounds for each in done):
        by_system.setdefault(replayed.system, []).append(replayed)
    systems: dict[str, dict[str, Any]] = {}
    for name, runs in sorted(by_system.items(), key=lambda item: median(run.mean_act for run in item[1])):
        figures = {key: [float(getattr(run, key)) for run in runs] for key in SHOWN}
        spread = {key: {"median": median(values), "least": min(values), "most": max(values)} for key, values in figures.items()}
        systems[name] = {**spread, "actions": runs[0].actions, "failed": max(run.failed for run in runs)}
    for found in systems.values():
        found["ratio"] = {key: found[key]["median"] / systems[OURS][key]["median"] for key in JUDGED}
    # A system that loses actions has less to do: it does not count as faster.
    sound = all(found["failed"] == 0 for found in systems.values())
    others = [found for name, found in systems.items() if name != OURS]
    first = sound and all(found["ratio"][key] > 1.0 for found in others for key in JUDGED)
    return {"systems": systems, "first": first, "rounds": [[asdict(each) for each in done] for done in rounds]}


def text(document: dict[str, Any]) -> str:
    """Return the table for a person: medians, and for the judged figures the range over the rounds in brackets."""
    lines = [
        f"{'':9}{'mean ACT':>21}{'× elastic':>11}{'step duration':>21}{'× elastic':>11}"
        f"{'p95 ACT':>9}{'execution':>11}{'commands CPU':>14}{'machine CPU':>13}{'failed':>8}"
    ]
    for name, found in document["systems"].items():
        middle = {key: found[key]["median"] for key in SHOWN}
        lines.append(
            f"{name:9}{_spread(found['mean_act'], 3):>21}{found['ratio']['mean_act']:>11.2f}"
            f"{_spread(found['step_duration'], 1):>21}{found['ratio']['step_duration']:>11.2f}"
            f"{middle['p95_act']:>9.2f}{middle['mean_execution']:>11.3f}{middle['cpu_s']:>14.1f}{middle['machine_s']:>13.1f}{found['failed']:>8}"
        )
    count = len(document["rounds"])
    lines.append(f"seconds; median (least–most) of {count} rounds; {OURS} is {'' if document['first'] else 'not '}first in both.")
    return "\n".join(lines)


def _spread(figure: dict[str, float], digits: int) -> str:
    return f"{figure['median']:.{digits}f} ({figure['least']:.{digits}f}–{figure['most']:.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
