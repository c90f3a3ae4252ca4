"""From titles to slugs: short names for addresses and files."""

from __future__ import annotations

import unicodedata

from textkit.tokens import words

LONGEST = 60


def fold(text: str) -> str:
    """Give `text` in plain ASCII letters, without accents."""
    decomposed = unicodedata.normalize("NFKD", text.replace("ß", "ss"))
    return decomposed.encode("ascii", "ignore").decode("ascii")


def slug(title: str, longest: int = LONGEST) -> str:
    """Join the words of `title` with hyphens, in at most `longest` characters, cutting between words."""
    kept = ""
    for word in words(fold(title)):
        word = word.replace("'", "")
        candidate = f"{kept}-{word}" if kept else word[:longest]
        if len(candidate) > longest:
            break
        kept = candidate
    return kept


def unique_slug(title: str, taken: set[str], longest: int = LONGEST) -> str:
    """Give a slug that is not in `taken`, numbered from 2 where need be, and add it to `taken`."""
    name = first = slug(title, longest)
    number = 1
    while name in taken:
        number += 1
        ending = f"-{number}"
        name = first[: longest - len(ending)] + ending
    taken.add(name)
    return name
