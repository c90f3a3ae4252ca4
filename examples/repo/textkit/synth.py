"""A corpus made up from a seed: `python3 -m textkit.synth [--documents N] [--words N] [--seed N] TARGET`.

Words follow Zipf's law, as in real text, and every twentieth document repeats an earlier one with some words changed.
"""

from __future__ import annotations

import argparse
import random
from itertools import accumulate
from pathlib import Path

VOCABULARY = 4000
COPY_EVERY = 20
CHANGED = 0.03
_SYLLABLES = ("ba", "co", "di", "fe", "gu", "ha", "jo", "ki", "le", "mo", "nu", "pa", "re", "si", "to", "vu")


def vocabulary(size: int = VOCABULARY) -> list[str]:
    """Make up `size` words, the same ones every time."""
    base = len(_SYLLABLES)
    return [_SYLLABLES[n % base] + _SYLLABLES[n // base % base] + _SYLLABLES[n // base**2 % base] for n in range(size)]


def documents(count: int, length: int, seed: int) -> list[str]:
    """Make up `count` texts of about `length` words."""
    draw = random.Random(seed)
    known = vocabulary()
    weights = list(accumulate(1.0 / rank for rank in range(1, len(known) + 1)))
    made: list[list[str]] = []
    for number in range(count):
        if number % COPY_EVERY == COPY_EVERY - 1:
            made.append([draw.choice(known) if draw.random() < CHANGED else word for word in draw.choice(made)])
        else:
            made.append(draw.choices(known, cum_weights=weights, k=length))
    return [_sentences(found) for found in made]


def _sentences(found: list[str]) -> str:
    return " ".join(word.capitalize() + "." if place % 12 == 11 else word for place, word in enumerate(found)) + "\n"


def main() -> None:
    """Write a corpus from the command line."""
    parser = argparse.ArgumentParser(description="make up a corpus")
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--words", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("target", type=Path)
    asked = parser.parse_args()
    asked.target.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents(asked.documents, asked.words, asked.seed)):
        (asked.target / f"d{number:04}.txt").write_text(text)
    print(f"{asked.documents} documents in {asked.target}")


if __name__ == "__main__":
    main()
