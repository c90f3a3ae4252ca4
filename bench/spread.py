"""A figure over several runs of the same thing: seeds of a simulation, rounds of a live comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value per run, of which there is at least one."""
        return cls(median=median(values), least=min(values), most=max(values))

    def text(self, digits: int) -> str:
        """Return it for a person: the median, and the range in brackets."""
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}–{self.most:.{digits}f})"
