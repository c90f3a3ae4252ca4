"""The same rollouts live on this machine under every system: mean ACT and step duration, compared in one run.

`python -m bench.live` replays the bundled rollouts, with the commands that were recorded, under `elastic`, under fixed
degrees of parallelism and under Ray. All have the same trajectories, arrivals, think times, files, variables and cores;
each replay has a stack of its own, started before and stopped afterwards. Rounds alternate, each in another order, so that
what the machine does meanwhile hits all. Think times are stretched by what the machine is slower than the recording
(`pace.py`), so that the load is the recorded one. The exit code is 0 only if `elastic` is first in both figures.

With `--trace FILE`, rollouts of that trace are replayed instead. An action without a command burns its recorded CPU time and
sleeps for the rest of its recorded duration; every system runs the same program for that. The exit code is then 0 only if
`elastic` reaches the goal `bench.live_compare.CLEARLY_AHEAD`.

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

from app.local.stack import cores_here
from app.replay.replay_command import LiveResult, ReplayOptions, replay_live
from bench.live_compare import CLEARLY_AHEAD, FIRST, OURS, compare, text
from bench.live_record import Act, MachineMeter, Replayed, metered
from bench.live_trace import Workload, add_options, words, workload_of
from bench.pace import measured_pace
from scheduler.policies import make_policy
from tangram.errors import TangramError
from tangram.settings import Settings

AMOUNTS = (1, 2, 4)
FOR_A_TRACE = (OURS, "fcfs", "fixed:1", "ray:1")
"""What a given trace is replayed under by default: most recorded commands use one core."""

LIMIT_S = 900.0
"""Longest time for one replay: a system that loses an action would be waited for in vain."""


class Refused(Exception):
    """Raised when the command line asks for what cannot be measured; says what in one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0 if `elastic` is first."""
    options = _parser().parse_args(arguments)
    try:
        workload = workload_of(options)
        systems = chosen_systems(options.policies or ("" if workload.file is None else ",".join(FOR_A_TRACE)), options.cores)
        if options.rounds < 1 or any(not 0 < value < inf for value in (workload.speed, workload.pace, workload.scale)):
            raise Refused("--rounds must be at least 1, --speed, --pace and --scale above 0")
        workload.trace()
        if options.pace is None and workload.file is None:
            workload = replace(workload, pace=measured_pace(options.cores))
            print(f"commands take {workload.pace:.2f} times as long as recorded, so does thinking", file=sys.stderr, flush=True)
        rounds = measure(systems, workload, options.cores, options.rounds)
    except (Refused, TangramError) as error:
        print(f"bench.live: {error}", file=sys.stderr)
        return 2
    document = compare(rounds, FIRST if workload.file is None else CLEARLY_AHEAD)
    document |= {"workload": asdict(replace(workload, file=None)) | {"file": str(workload.path)}, "cores": options.cores}
    print(json.dumps(document, indent=2) if options.json else text(document))
    return 0 if document["goal"]["met"] else 1


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

    Raises `Refused` when there is no such system, or Ray is wanted and not installed.
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
    line = f"mean ACT {replayed.mean_act:.3f} s, step {replayed.step_duration:.2f} s, cores short {replayed.short:.0%} of the time"
    line += f", CPU {replayed.machine_s:.0f} s, of which commands {replayed.cpu_s:.0f} s"
    print(f"round {number + 1}, {system}: {line}, {replayed.failed} of {replayed.actions} failed", file=sys.stderr, flush=True)
    return replayed


def _under_tangram(policy: str, workload: Workload, cores: int) -> Replayed:
    """Replay as `tangram replay --live` does, on a stack of its own."""
    meters: list[MachineMeter] = []
    urls = {"broker_url": None, "result_url": None, "database_url": None, "services_file": None}
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder, _time_limit(policy):
        settings = Settings().model_copy(update={**urls, "state_dir": Path(folder)})
        options = ReplayOptions(policy=policy, cores=cores, gpus=0, speed=workload.think_divisor)
        result = replay_live(workload.trace(), workload.path, options, settings, metered(meters), lambda line: None)
    return _of_live(policy, result, meters[-1])


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


def _of_live(policy: str, result: LiveResult, meter: MachineMeter) -> Replayed:
    run = result.record
    acts = [
        Act(act_s=each.act_s, execution_s=each.execution_s, cpu_s=each.cpu_s, succeeded=each.status == "succeeded") for each in run.actions
    ]
    return Replayed.of(policy, acts, run.last_result_s - run.first_arrival_s, meter.used_s, short=meter.short, resizes=run.resizes)


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


if __name__ == "__main__":
    sys.exit(main())
