"""Figures of a text: how long, how varied, how hard to read."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from textkit.tokens import sentences, words

_VOWELS = re.compile(r"[aeiouy]+")


@dataclass(frozen=True)
class Figures:
    """What was counted in a text; `variety` is the share of distinct words, `ease` is Flesch's reading ease."""

    words: int
    sentences: int
    variety: float
    ease: float


def syllables(word: str) -> int:
    """Estimate the syllables of an English word: its groups of vowels, a silent final e not counted."""
    groups = len(_VOWELS.findall(word.lower()))
    if word.lower().endswith("e") and not word.lower().endswith("le") and groups > 1:
        groups -= 1
    return max(groups, 1)


def figures(text: str) -> Figures:
    """Count `text`. Raises `ValueError` for a text without words."""
    found = words(text)
    if not found:
        raise ValueError("a text without words has no figures")
    count = max(len(sentences(text)), 1)
    per_sentence = len(found) / count
    per_word = sum(map(syllables, found)) / len(found)
    ease = 206.835 - 1.015 * per_sentence - 84.6 * per_word
    return Figures(len(found), count, len(set(found)) / len(found), ease)


def common(text: str, most: int = 10, ignore: frozenset[str] = frozenset()) -> list[tuple[str, int]]:
    """Give the `most` frequent words with their counts, leaving out `ignore`; ties in the order of the alphabet."""
    counts = Counter(word for word in words(text) if word not in ignore)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
