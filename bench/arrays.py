"""What numbers cost on their way: a batch of token ids there and its log-probs back, packed and as JSON lists.

`python -m bench.arrays` packs 256 sequences of 2,048 ids of a vocabulary of 152,000 and as many log-probs, writes both as
JSON as a message would hold them, and reads them again. Sizes are bytes of JSON, times the least of three runs, one core.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

from tangram.arrays import pack_floats, pack_ints, unpack_floats, unpack_ints

SEQUENCES, LENGTH, VOCABULARY = 256, 2048, 152_000


def main() -> None:
    """Measure and print one Markdown table."""
    draws = random.Random(0)
    ids = [[draws.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(SEQUENCES)]
    logprobs = unpack_floats(pack_floats([[-draws.expovariate(0.5) for _ in range(LENGTH - 1)] for _ in range(SEQUENCES)]))
    print("| numbers | JSON lists, MB | packed, MB | lists / packed | JSON lists, ms | packed, ms | lists / packed |")
    print("|---|---|---|---|---|---|---|")
    _row("token ids", ids, pack_ints, unpack_ints)
    _row("log-probs", logprobs, pack_floats, unpack_floats)
    try:
        import numpy
    except ImportError:
        return
    _row("token ids from numpy", numpy.array(ids), pack_ints, unpack_ints, lambda rows: rows.tolist())


def _row(what: str, rows: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], listed: Callable[[Any], Any] = list) -> None:
    plain, plain_s = _least(lambda: json.dumps(listed(rows), separators=(",", ":")), json.loads)
    packed, packed_s = _least(lambda: json.dumps(pack(rows), separators=(",", ":")), lambda text: unpack(json.loads(text)))
    sizes = f"{len(plain) / 1e6:.2f} | {len(packed) / 1e6:.2f} | {len(plain) / len(packed):.1f}"
    print(f"| {what} | {sizes} | {plain_s * 1e3:.0f} | {packed_s * 1e3:.0f} | {plain_s / packed_s:.1f} |")


def _least(write: Callable[[], str], read: Callable[[str], Any]) -> tuple[str, float]:
    """Return the text, and the seconds of writing and reading it."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        text = write()
        read(text)
        best = min(best, time.perf_counter() - began)
    return text, best


if __name__ == "__main__":
    main()
