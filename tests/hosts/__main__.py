"""What faults of hosts and network cost rollouts: `python -m tests.hosts`, a row for each fault.

`make chaos-live` draws schedules of several faults at once instead, one for each seed: `python -m tests.hosts --seeds 50 --first 0`.

Each round opens environments on two nodes. Each environment has a shell that remembers, a server, a command that runs through the fault,
and a command that is asked for in the middle of it, each at another time. The commands write a ledger themselves: the file `marks` of
their environment. A round is right when no environment is lost that could live, no command ran twice, and each result agrees with the
ledger.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

from tangram import Client, TangramError
from tangram.client import Environment
from tangram.errors import ActionLost, EnvironmentLost
from tangram.handles import Handle
from tangram.results import ExecResult
from tests.hosts.deployment import NODES, Deployment, NotThere
from tests.hosts.faults import FAULTS, Fault, schedule
from tests.hosts.network import Network, NoNamespaces

RESULT_LOST = "result_lost"
"""The cause of an action's end that is told where its result has been lost."""

AWAY_S = 180.0
"""Seconds within which each command of a round must have ended, fault and all."""


@dataclass
class Round:
    """What became of the environments and commands of one fault."""

    fault: str
    environments: int
    lost: int = 0
    told_lost_s: float | None = None
    """Seconds from the beginning of the fault until the last lost environment was told as such."""
    commands: int = 0
    delivered: int = 0
    succeeded_per_s: float = 0.0
    """Short commands per second while the fault lasted, over all environments."""
    twice: int = 0
    disagree: int = 0
    """Results that the ledger contradicts."""
    changed: int = 0
    """Environments that live, but whose shell has forgotten, or whose server has ended."""
    next_s: float | None = None
    """Seconds from the end of the fault until each environment that lives had carried out a command."""
    errors: Counter[str] = field(default_factory=Counter)

    def is_right(self, fault: Fault) -> bool:
        """Tell whether nothing is lost that could live, nothing ran twice, and all is told as it was."""
        allowed = {error.__name__ for error in fault.may_lose} | ({RESULT_LOST} if fault.may_lose_results else set())
        lost = self.lost and EnvironmentLost not in fault.may_lose
        return not (self.twice or self.disagree or self.changed or lost or self.errors.keys() - allowed)


def _kept(handle: Handle[ExecResult], row: Round) -> bool | None:
    """Wait for a command; return whether it succeeded, None where nobody knows, since its environment is lost."""
    row.commands += 1
    try:
        succeeded = handle.result(AWAY_S).exit_code == 0
    except (EnvironmentLost, ActionLost) as error:
        row.errors[type(error).__name__] += 1
        return None
    except TangramError as error:
        row.errors[RESULT_LOST if error.cause == RESULT_LOST else f"{type(error).__name__}: {error}"[:120]] += 1
        return None
    row.delivered += 1
    return succeeded


class _Busy:
    """Short commands in one environment after the other, as long as a fault lasts, by a thread for two of them, 16 at most."""

    def __init__(self, environments: Sequence[Environment]) -> None:
        self.ended = 0
        self._over = False
        threads = min(16, len(environments) // 2 + 1)
        self._threads = [Thread(target=self._run, args=(environments[number::threads],), daemon=True) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, environments: Sequence[Environment]) -> None:
        while not self._over and environments:
            for env in environments:
                try:
                    env.exec("true", session="busy", queue_timeout_s=AWAY_S)
                except TangramError:
                    return
                self.ended += not self._over

    def stop(self) -> int:
        """Return how many commands have ended; what is under way is left to its end."""
        self._over = True
        return self.ended


@contextmanager
def _given_up(client: Client) -> Iterator[None]:
    """Close the client of a block that is interrupted: its threads would wait for their commands to the end."""
    try:
        yield
    except BaseException:
        client.close()
        raise


def carry_out(fault: Fault, deployment: Deployment, client: Client, environments: int) -> Round:
    """Open environments, let a fault happen, and look at what is left."""
    row = Round(fault.name, environments)
    with ThreadPoolExecutor(environments) as threads, _given_up(client):
        opened = list(
            threads.map(lambda number: client.open(trajectory=f"{fault.name} {number}", queue_timeout_s=AWAY_S), range(environments))
        )
        list(threads.map(lambda env: env.exec("kept=1; cd /tmp; sleep 1000 & echo $! > ~/pid"), opened))
        long = [env.submit(f"sleep {fault.lasts_s + 1:g}; echo long >> ~/marks", session="long") for env in opened]
        time.sleep(0.5)
        began = time.monotonic()
        fault.begin(deployment)
        busy = _Busy(opened)

        def ask(number: int) -> Handle[ExecResult]:
            time.sleep(number / environments * fault.lasts_s)
            return opened[number].submit("echo middle >> ~/marks", queue_timeout_s=AWAY_S)

        middle = [threads.submit(ask, number) for number in range(environments)]
        time.sleep(max(0.0, fault.lasts_s - (time.monotonic() - began)))
        row.succeeded_per_s = busy.stop() / (time.monotonic() - began)
        fault.end(deployment)
        ended = time.monotonic()

        def after(number: int) -> None:
            env = opened[number]
            state = None
            try:
                state = env.exec("pwd; kill -0 $(cat ~/pid) && echo $kept", queue_timeout_s=AWAY_S).stdout
                row.next_s = max(row.next_s or 0.0, time.monotonic() - ended)
            except TangramError as error:
                row.lost += 1
                row.errors[type(error).__name__] += 1
                row.told_lost_s = max(row.told_lost_s or 0.0, time.monotonic() - began)
            told = {"long": _kept(long[number], row), "middle": _kept(middle[number].result(), row)}
            if state is None:
                return
            row.changed += state != "/tmp\n1\n"
            marks = Counter(env.read_file("marks").decode().split()) if any(told.values()) else Counter()
            row.twice += sum(count > 1 for count in marks.values())
            row.disagree += sum(marks[word] != bool(succeeded) for word, succeeded in told.items() if succeeded is not None)
            env.close()

        list(threads.map(after, range(environments)))
    return row


def main(words: Sequence[str] | None = None) -> int:
    """Run the rounds; return 1 where a round is not right, 2 where this machine cannot carry them out."""
    parser = argparse.ArgumentParser("tests.hosts", description=__doc__)
    parser.add_argument("--environments", type=int, default=30, help="environments of a round (default: 30)")
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose name has one of these in it")
    parser.add_argument("--seeds", type=int, help="so many schedules of several faults at once, instead of these faults")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--lost-s", type=float, default=60.0, help="TANGRAM_NODE_LOST_S (default: 60)")
    parser.add_argument("--lasts-s", type=float, help="how long each fault lasts, instead of its own time")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each round")
    chosen = parser.parse_args(words)
    faults = FAULTS if chosen.seeds is None else tuple(map(schedule, range(chosen.first, chosen.first + chosen.seeds)))
    faults = tuple(fault for fault in faults if any(part in fault.name for part in chosen.only))
    variables = {"TANGRAM_SANDBOX": "process", "TANGRAM_NODE_LOST_S": str(chosen.lost_s)}
    wrong = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tangram-hosts-") as folder,
            Network([*NODES, "trainer"]) as network,
            Deployment(network, Path(folder), variables, cores=chosen.environments * 2) as deployment,
        ):
            network.enter("trainer")
            for fault in faults:
                if chosen.lasts_s is not None:
                    fault = replace(fault, name=f"{fault.name}, but for {chosen.lasts_s:g} s", lasts_s=chosen.lasts_s)
                with Client(job="hosts", settings=deployment.settings()) as client:
                    row = carry_out(fault, deployment, client, chosen.environments)
                right = row.is_right(fault)
                wrong += not right
                print(_told(row, right, chosen.json), flush=True)
    except (NoNamespaces, NotThere) as error:
        print(f"tests.hosts: {error}", file=sys.stderr)
        return 2
    return min(wrong, 1)


def _told(row: Round, right: bool, as_json: bool) -> str:
    if as_json:
        return json.dumps({**vars(row), "errors": dict(row.errors), "right": right})
    seconds = "  – " if row.next_s is None else f"{row.next_s:4.1f}"
    lost = f"{row.lost} of {row.environments} lost" + (f", told after {row.told_lost_s:.1f} s" if row.told_lost_s else "")
    results = f"{row.delivered} of {row.commands} results, {row.twice} twice, {row.disagree} disagree, {row.changed} changed"
    tail = "; ".join(f"{count} × {error}" for error, count in row.errors.items())
    return f"{'ok   ' if right else 'WRONG'} {row.fault:36} {lost}; {results}; {row.succeeded_per_s:.0f}/s; next {seconds} s  {tail}"


if __name__ == "__main__":
    sys.exit(main())
