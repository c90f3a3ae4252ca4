"""What ranks and the most likely ids cost: logits read with several `top_k`.

`python -m bench.top_k` draws logits of a vocabulary as large as that of Qwen 2.5, reads them as the torch engine does, and prints seconds
and the size of a stored result. The forward pass is left out: it is the same with and without `top_k`. On the CPU the seconds are those of
one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from workers.gpu.engines import compute
from workers.gpu.items import TokenLogprobs
from workers.gpu.tasks import packed_ranked

_VOCABULARY = 151_936
_TIMES = 3


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print one Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m bench.top_k", description="Measure the reading of ranks and the most likely ids.")
    parser.add_argument("--positions", type=int, default=128, help="positions whose logits are read")
    parser.add_argument("--device", default="cpu", help="where to compute, such as cuda")
    asked = parser.parse_args(words)
    torch.set_num_threads(1)
    logits = torch.randn(asked.positions, _VOCABULARY, device=asked.device)
    ids = torch.randint(0, _VOCABULARY, (asked.positions,), device=asked.device)
    # Other programs on the machine do not count where the core's own time is known.
    clock = time.process_time if asked.device == "cpu" else time.perf_counter
    print("| top_k | 1,000 positions, s | their result, KiB |")
    print("|---|---|---|")
    for top_k in (None, 0, 1, 20, 128):
        seconds, said = _measured(lambda top_k=top_k: compute.read_logits(logits, ids, top_k), clock)
        thousand = 1000 / asked.positions
        print(f"| {'none' if top_k is None else top_k} | {seconds * thousand:.2f} | {_bytes(said, top_k) * thousand / 1024:.0f} |")


def _measured(read: Callable[[], TokenLogprobs], clock: Callable[[], float]) -> tuple[float, TokenLogprobs]:
    """Return the median seconds of a few times, after one that warms up, and what was read."""
    said, taken = read(), []
    for _ in range(_TIMES):
        began = clock()
        read()
        taken.append(clock() - began)
    return statistics.median(taken), said


def _bytes(said: TokenLogprobs, top_k: int | None) -> int:
    packed = packed_ranked([said])
    return len(json.dumps(packed["logprobs"] if top_k is None else packed))


if __name__ == "__main__":
    main()
