"""An index of the n-grams of a corpus: `python3 -m textkit.index [--jobs N] CORPUS SHARDS`.

The documents are dealt out to a fixed number of shards, each one file, so the index is the same on any number of
processes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from textkit.parallel import default_jobs, map_parts
from textkit.tokens import ngrams, words

SHARDS = 8
LONGEST_NGRAM = 3


def count(text: str, longest: int = LONGEST_NGRAM) -> Counter[str]:
    """Count the n-grams of `text`, for every n up to `longest`; the words of one are joined by spaces."""
    found = words(text)
    counts: Counter[str] = Counter()
    for n in range(1, longest + 1):
        counts.update(map(" ".join, ngrams(found, n)))
    return counts


def build(corpus: Path, target: Path, jobs: int) -> int:
    """Count the documents of `corpus` into shards under `target`, on `jobs` processes. Return how many there were."""
    documents = sorted(corpus.glob("*.txt"))
    target.mkdir(parents=True, exist_ok=True)
    shards = [(number, documents[number::SHARDS]) for number in range(SHARDS)]
    return sum(map_parts(partial(_build_shards, target), shards, jobs))


def load(target: Path) -> dict[str, Counter[str]]:
    """Read the shards under `target`: the counts of every document, by name."""
    counts: dict[str, Counter[str]] = {}
    for path in sorted(target.glob("shard-*.json")):
        counts.update((name, Counter(found)) for name, found in json.loads(path.read_text()).items())
    return counts


def search(counts: dict[str, Counter[str]], query: str, most: int = 5) -> list[tuple[str, float]]:
    """Rank documents for `query` by the sum of tf · log(N / df) over its words, best first, then by name."""
    ranked: defaultdict[str, float] = defaultdict(float)
    for word in set(words(query)):
        having = {name: found[word] for name, found in counts.items() if word in found}
        for name, times in having.items():
            ranked[name] += times * math.log(len(counts) / len(having))
    hits = [(name, score) for name, score in ranked.items() if score > 0]
    return sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:most]


def _build_shards(target: Path, shards: Sequence[tuple[int, list[Path]]]) -> int:
    total = 0
    for number, documents in shards:
        counts = {path.stem: count(path.read_text()) for path in documents}
        (target / f"shard-{number}.json").write_text(json.dumps(counts))
        total += len(documents)
    return total


def main() -> None:
    """Build the index from the command line."""
    parser = argparse.ArgumentParser(description="index the n-grams of a corpus")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("corpus", type=Path)
    parser.add_argument("shards", type=Path)
    asked = parser.parse_args()
    print(f"{build(asked.corpus, asked.shards, asked.jobs)} documents in {SHARDS} shards")


if __name__ == "__main__":
    main()
