"""Near-duplicates in a corpus: `python3 -m textkit.similar [--jobs N] [--threshold X] CORPUS`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path
from typing import TypeVar

from textkit.parallel import default_jobs, map_parts
from textkit.tokens import ngrams, words

SHINGLE = 3
THRESHOLD = 0.5

Item = TypeVar("Item")
Pair = tuple[str, str, float]


def shingles(text: str, n: int = SHINGLE) -> frozenset[str]:
    """Give the n-grams of `text` as a set of strings."""
    return frozenset(map(" ".join, ngrams(words(text), n)))


def jaccard(left: Set[Item], right: Set[Item]) -> float:
    """Give the share of what two sets have in common; two empty sets are alike."""
    common = len(left & right)
    total = len(left) + len(right) - common
    return common / total if total else 1.0


def near_duplicates(documents: dict[str, str], threshold: float = THRESHOLD, jobs: int = 1) -> list[Pair]:
    """Compare every two documents, on `jobs` processes; give the pairs at or above `threshold`, most alike first."""
    sets = [(name, shingles(text)) for name, text in sorted(documents.items())]
    rows = list(range(len(sets)))
    found = [pair for part in map_parts(partial(_compare_rows, sets, threshold), rows, jobs) for pair in part]
    return sorted(found, key=lambda pair: (-pair[2], pair[0], pair[1]))


def _compare_rows(sets: Sequence[tuple[str, frozenset[str]]], threshold: float, rows: Sequence[int]) -> list[Pair]:
    pairs = []
    for row in rows:
        name, left = sets[row]
        for other, right in sets[row + 1 :]:
            alike = jaccard(left, right)
            if alike >= threshold:
                pairs.append((name, other, alike))
    return pairs


def main() -> None:
    """List the near-duplicates of a corpus on the command line."""
    parser = argparse.ArgumentParser(description="find near-duplicates")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--threshold", type=float, default=THRESHOLD)
    parser.add_argument("corpus", type=Path)
    asked = parser.parse_args()
    documents = {path.stem: path.read_text() for path in asked.corpus.glob("*.txt")}
    for left, right, alike in near_duplicates(documents, asked.threshold, asked.jobs):
        print(f"{alike:.3f} {left} {right}")


if __name__ == "__main__":
    main()
