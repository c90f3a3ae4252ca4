"""From text to words, sentences and n-grams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*|\d+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def words(text: str) -> list[str]:
    """Give the words of `text` in lower case; an apostrophe inside a word belongs to it."""
    return [match.group().lower() for match in _WORD.finditer(text)]


def sentences(text: str) -> list[str]:
    """Split `text` after full stops, exclamation and question marks."""
    return [sentence for sentence in _SENTENCE_END.split(text.strip()) if sentence]


def ngrams(items: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    """Give every run of `n` neighbours. Raises `ValueError` for `n` below 1."""
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    return zip(*(items[offset:] for offset in range(n)), strict=False)
