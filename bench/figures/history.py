"""The values of earlier runs, in a JSON Lines file that is never shortened, and whether a value has moved.

A value has moved when it lies outside the range of the last `KEPT` ones and is more than `FAR` off their median. Either condition by
itself would report noise: of eleven equally distributed values the last one is the highest or the lowest twice in eleven runs, and some
figures always vary by more than `FAR`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

KEPT = 10
"""How many of the last values a value is compared with."""

LEAST = 3
"""With fewer earlier values than this nothing can have moved."""

FAR = 0.2
"""Part of the median that a value may be off."""


class HistoryError(Exception):
    """Raised when the file of earlier values cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value as it was measured: when (ISO 8601), at which commit, and at what load of the machine."""

    name: str
    unit: str
    value: float
    at: str
    commit: str
    load: float


def read(path: Path) -> dict[str, list[float]]:
    """Return the last `KEPT` values of each figure, the oldest first; none where there is no file.

    Raises `HistoryError` when a line cannot be read.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            entry = Entry(**json.loads(line))
            found[entry.name].append(float(entry.value))
        except (ValueError, TypeError) as error:
            raise HistoryError(f"{path}:{number}: no earlier value ({error}); delete the line") from error
    return {name: values[-KEPT:] for name, values in found.items()}


def add(path: Path, entry: Entry) -> None:
    """Append a value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(entry)) + "\n")


def moved(value: float, earlier: Sequence[float]) -> bool:
    """Return whether a value has moved from earlier ones, of which the last `KEPT` count."""
    last = earlier[-KEPT:]
    if len(last) < LEAST or min(last) <= value <= max(last):
        return False
    middle = median(last)
    return abs(value - middle) > FAR * abs(middle)


def words(value: float, earlier: Sequence[float]) -> str:
    """Return in words how a value stands to earlier ones, of which the last `KEPT` count."""
    last = earlier[-KEPT:]
    if len(last) < LEAST:
        return "no earlier value" if not last else f"too few earlier values: {len(last)}"
    if not moved(value, last):
        return "not moved"
    middle = median(last)
    side = "above" if value > middle else "below"
    far = f"{abs(value / middle - 1):.0%} {side} the median" if middle else f"{side} the median, which is 0"
    return f"MOVED: {far}, {side} all of the last {len(last)}"


def short(values: Iterable[float]) -> str:
    """Return values for a person, with three digits each."""
    return " ".join(f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}" for value in values)
