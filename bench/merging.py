"""What merging brings: calls of one service that come at the same time, computed together and one by one.

`python -m bench.merging` makes the tiny teacher. 16 threads ask for the log-probs of one sequence of 64 ids each, again and again. The
engine merges what waits. It is compared with the same threads that compute each call by itself.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.tiny_models import make_tiny
from workers.gpu.devices import discover
from workers.gpu.engines import compute
from workers.gpu.engines.torch_hf import TorchEngine
from workers.gpu.items import Reading

Ask = Callable[[list[list[int]]], list[list[float]]]


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print one Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m bench.merging", description="Compare merged calls with calls one by one.")
    parser.add_argument("--threads", type=int, default=16, help="calls at the same time")
    parser.add_argument("--calls", type=int, default=25, help="calls of each thread")
    parser.add_argument("--length", type=int, default=64, help="token ids of a call")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        engine = TorchEngine(
            "teacher", "logprobs", make_tiny(Path(folder) / "teacher", "teacher"), Path(folder), max_concurrency=asked.threads
        )
        engine.start(discover(1))
        apart, merged = rates(engine, asked.threads, asked.calls, asked.length)
    print("| calls at once | one by one, calls/s | merged, calls/s | ratio |")
    print("|---|---|---|---|")
    print(f"| {asked.threads} | {apart:.0f} | {merged:.0f} | {merged / apart:.1f} |")


def rates(engine: TorchEngine, threads: int, calls: int, length: int) -> tuple[float, float]:
    """Return calls per second of an engine that is resident: each by itself, and as the engine merges them."""
    model = engine._replicas[0].model
    apart = _rate(lambda batch: [said.logprobs for said in compute.logprobs(model, list(map(Reading, batch)))], threads, calls, length)
    return apart, _rate(engine.logprobs, threads, calls, length)


def _rate(ask: Ask, threads: int, calls: int, length: int) -> float:
    """Return calls per second, after one call that warms up."""
    ask([list(range(length))])

    def many(thread: int) -> None:
        for call in range(calls):
            ask([[(thread + call + place) % 500 for place in range(length)]])

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(many, range(threads)))
    return threads * calls / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
