"""Memory by action against programs that want too much: one that never has enough, and forty that all grow at once.

    python -m bench.memory_hostile [--image IMAGE] [--rounds N]

*One that never has enough.* Twenty environments, each with a limit of 512 MB, are open on a node of 4 GB. Nineteen run commands that take
some memory and sleep. In every other round, the last one takes memory without end. It must end alone, by its own limit, as
`out_of_memory`. The figure is how much longer the commands of the nineteen take beside it: the median of their times over that of the
round before.

*Forty that grow at once.* Forty environments, each with a limit of 400 MB, are open on a node of 2 GB. Then each runs a command that takes
300 MB at once. All must end right, one after the other; the figures are the seconds until the last has ended, and those without such
growth. Environments are processes with control groups, or containers of an image with python3. The exit code is 0 if all ended as it must.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from app.local import stack
from app.local.stack import StackPlan
from bench.tools import running
from tangram import Client, Environment, ExecResult, Settings

TAKES = "python3 -S -c 'import time; held = b\"x\" * ({mb} << 20); time.sleep({s}); print(len(held) >> 20)'"
WITHOUT_END = "python3 -S -c 'held = []\nwhile True: held.append(b\"x\" * (16 << 20))'"
CALM_MB, GROWN_MB, SLEEP_S, COMMANDS = 30, 300, 0.5, 6
HANG_S = 300.0


@contextmanager
def opened(count: int, limit_mb: int, node_mb: int, image: str | None) -> Iterator[list[Environment]]:
    """Give open environments of a stack that grants memory, each of which has run a command, so that their job is known."""
    variables = {"TANGRAM_MEMORY": "elastic"}
    if image:
        variables |= {"TANGRAM_SANDBOX": "docker", "TANGRAM_IMAGE": image}
    plan = StackPlan(cores=64, memory_mb=node_mb, gpu_nodes=0, api_nodes=0, variables=variables)
    with running(plan) as started, Client("bench", settings=stack.settings_of(started, Settings())) as client, ExitStack() as opens:
        environments = []
        for number in range(count):
            environment = opens.enter_context(client.open(trajectory=f"t{number}", memory_mb=limit_mb, timeout_s=HANG_S))
            environment.exec("true")
            environments.append(environment)
        yield environments


def at_once(environments: Sequence[Environment], command: str) -> tuple[list[ExecResult], float]:
    """Run a command in all environments at the same time; return the results, and the seconds until the last one."""
    began = time.monotonic()
    handles = [environment.submit(command, timeout_s=HANG_S) for environment in environments]
    return [handle.result() for handle in handles], time.monotonic() - began


def is_right(result: ExecResult, mb: int) -> bool:
    """Say whether a command has printed what it held."""
    return (result.exit_code, result.stdout) == (0, f"{mb}\n")


def without_end(rounds: int, image: str | None) -> bool:
    """Print what a command that takes memory without end does to nineteen others; return whether it alone ended for it."""
    ratios, is_well = [], True
    with opened(20, 512, 4096, image) as environments:
        *calm, hostile = environments
        command = TAKES.format(mb=CALM_MB, s=SLEEP_S)
        for _ in range(rounds):
            acts: dict[bool, list[float]] = {}
            for is_beside in (False, True):
                greedy = hostile.submit(WITHOUT_END, timeout_s=HANG_S) if is_beside else None
                results = [result for _ in range(COMMANDS) for result in at_once(calm, command)[0]]
                acts[is_beside] = [result.act.total_s for result in results]
                is_well &= all(is_right(result, CALM_MB) for result in results)
                if greedy is not None:
                    ended = greedy.result()
                    is_well &= ended.cause == "out_of_memory"
                    print(f"  took without end: {ended.cause or ended.exit_code}, {ended.act.total_s:.1f} s", flush=True)
            ratios.append(median(acts[True]) / median(acts[False]))
    print(f"without end: the others took {median(ratios):.3f} times as long (rounds: {', '.join(f'{one:.3f}' for one in ratios)})")
    return is_well


def grow_at_once(image: str | None) -> bool:
    """Print how long forty environments take that all grow at once; return whether all ended right."""
    with opened(40, 400, 2048, image) as environments:
        _, calm_s = at_once(environments, TAKES.format(mb=1, s=SLEEP_S))
        results, grown_s = at_once(environments, TAKES.format(mb=GROWN_MB, s=SLEEP_S))
    right = sum(is_right(result, GROWN_MB) for result in results)
    paused_s = [result.act.background_s for result in results]
    print(
        f"at once: {right} of {len(results)} right in {grown_s:.1f} s, without growth {calm_s:.1f} s; paused {sum(paused_s):.0f} s in all"
    )
    return right == len(results)


def main() -> int:
    """Measure both, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory_hostile", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--image", help="containers of this image, which has python3, instead of processes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds with and without the command that takes without end")
    given = parser.parse_args()
    is_well = without_end(given.rounds, given.image)
    return 0 if grow_at_once(given.image) and is_well else 1


if __name__ == "__main__":
    sys.exit(main())
