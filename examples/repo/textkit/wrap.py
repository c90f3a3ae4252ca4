"""Lines of a given width."""

from __future__ import annotations


def wrap(text: str, width: int) -> list[str]:
    """Break `text` between words into lines of at most `width` characters; longer words are cut.

    Raises `ValueError` for a width below 1.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, not {width}")
    lines: list[str] = []
    line = ""
    for word in text.split():
        for piece in _pieces(word, width):
            if not line:
                line = piece
            elif len(line) + 1 + len(piece) <= width:
                line = f"{line} {piece}"
            else:
                lines.append(line)
                line = piece
    return [*lines, line] if line else lines


def justify(line: str, width: int) -> str:
    """Widen the spaces of `line` to `width` characters, the first ones by one more where it does not divide."""
    words = line.split()
    gaps = len(words) - 1
    if gaps < 1:
        return line
    spaces = max(width - sum(map(len, words)), gaps)
    wide, rest = divmod(spaces, gaps)
    parts = [word + " " * (wide + (index < rest)) for index, word in enumerate(words[:-1])]
    return "".join(parts) + words[-1]


def _pieces(word: str, width: int) -> list[str]:
    return [word[start : start + width] for start in range(0, len(word), width)]
