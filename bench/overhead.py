"""What an action costs on top of a plain Celery task: round trip and throughput, on the same Redis, in one run.

`python -m bench.overhead` starts an embedded stack and, beside it, a plain Celery worker on the same Redis. An empty
action goes through everything: client, routing, scheduler, journal, worker with claim, result. The plain task is
sent, run and waited for the way Celery's documentation does it. Both workers use the threads pool with as many threads.
Rounds alternate, so that what the machine does meanwhile hits both. The node declares many cores, which empty
actions do not use: what is measured is the system, not the wait for cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

from app.local import stack
from app.local.processes import Command
from bench.tasks import PLAIN_QUEUE
from tangram.action import Action, Cost
from tangram.client import Client
from tangram.settings import Settings

CORES = 32
THREADS = 64 + 8 * CORES
WARM_UP = 50
MOST_RATIO, LEAST_THROUGHPUT = 3.0, 0.5


def main() -> int:
    """Measure, print, and return 0 if both targets are met."""
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="tangram-bench-") as folder:
        plan = stack.StackPlan(cores=CORES, include=("bench.tasks",))
        with stack.start(plan, Path(folder)) as started:
            argv = (sys.executable, "-m", "celery", "-A", "bench.tasks:plain", "worker", "-P", "threads", "-c", str(THREADS))
            started.spawn(Command("plain", (*argv, "-Q", PLAIN_QUEUE, "-l", "WARNING", "--without-gossip", "--without-mingle")))
            stack.wait_until_up(started, plan)
            result = _measure(stack.settings_of(started, Settings()), options)
    print(json.dumps(result, indent=2) if options.json else _text(result))
    met = result["round_trip_ratio"] <= MOST_RATIO and result["throughput_ratio"] >= LEAST_THROUGHPUT
    return 0 if met else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of each measurement")
    parser.add_argument("--trips", type=int, default=100, help="round trips per round")
    parser.add_argument("--burst", type=int, default=2000, help="tasks per throughput round")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def _measure(settings: Settings, options: argparse.Namespace) -> dict[str, float]:
    plain = _plain_task(settings)
    with Client(job="bench", settings=settings) as client:
        empty = Action(kind="bench.empty", cost=Cost.of(cores=1))

        def one_action() -> None:
            client.submit(empty).result(timeout_s=30)

        def one_plain() -> None:
            plain.delay().get(timeout=30)

        def many_actions(count: int) -> None:
            for handle in [client.submit(empty) for _ in range(count)]:
                handle.result(timeout_s=120)

        def many_plain(count: int) -> None:
            for result in [plain.delay() for _ in range(count)]:
                result.get(timeout=120)

        for _ in range(WARM_UP):
            one_plain()
            one_action()
        trips: dict[str, list[float]] = {"plain": [], "action": []}
        for _ in range(options.rounds):
            trips["plain"] += _times(one_plain, options.trips)
            trips["action"] += _times(one_action, options.trips)
        rates: dict[str, list[float]] = {"plain": [], "action": []}
        for _ in range(options.rounds):
            rates["plain"].append(options.burst / _once(lambda: many_plain(options.burst)))
            rates["action"].append(options.burst / _once(lambda: many_actions(options.burst)))
    return _figures(trips, rates)


def _plain_task(settings: Settings):  # type: ignore[no-untyped-def]
    """Return the plain task, sent from here the way any Celery client does."""
    from bench import tasks

    tasks.plain.conf.update(broker_url=settings.broker_url, result_backend=settings.result_url)
    return tasks.empty_task


def _times(call: Callable[[], None], count: int) -> list[float]:
    return [_once(call) for _ in range(count)]


def _once(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _figures(trips: dict[str, list[float]], rates: dict[str, list[float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ("plain", "action"):
        low, middle, high = quantiles(trips[name], n=4)
        found |= {f"{name}_ms_p25": low * 1e3, f"{name}_ms_p50": middle * 1e3, f"{name}_ms_p75": high * 1e3}
        found |= {f"{name}_per_s_min": min(rates[name]), f"{name}_per_s_p50": median(rates[name]), f"{name}_per_s_max": max(rates[name])}
    found["round_trip_ratio"] = found["action_ms_p50"] / found["plain_ms_p50"]
    found["throughput_ratio"] = found["action_per_s_p50"] / found["plain_per_s_p50"]
    return found


def _text(found: dict[str, float]) -> str:
    lines = [f"{'':22}{'plain Celery':>24}{'action':>24}{'ratio':>8}  target"]
    trips = [f"{found[f'{n}_ms_p50']:.2f} ({found[f'{n}_ms_p25']:.2f}–{found[f'{n}_ms_p75']:.2f}) ms" for n in ("plain", "action")]
    rates = [f"{found[f'{n}_per_s_p50']:.0f} ({found[f'{n}_per_s_min']:.0f}–{found[f'{n}_per_s_max']:.0f}) /s" for n in ("plain", "action")]
    lines.append(f"{'round trip, p50 (IQR)':22}{trips[0]:>24}{trips[1]:>24}{found['round_trip_ratio']:>8.2f}  ≤ {MOST_RATIO:g}")
    lines.append(f"{'throughput, p50 (range)':22}{rates[0]:>24}{rates[1]:>24}{found['throughput_ratio']:>8.2f}  ≥ {LEAST_THROUGHPUT:g}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
