"""What a figure is, and which ones there are. A figure is declared with `@figure(unit)` on the function that measures it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MODULES = (
    "journal",
    "reporting",
    "scheduling",
    "sandbox",
    "environments",
    "containers",
    "burning",
    "simulation",
    "client",
    "stack",
    "quotas",
    "gateway",
    "teachers",
    "loading",
)
"""The modules of this package with figures, in the order in which they are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number of one machine. `meaning` is what the first line of its function's docstring says that it returns."""

    name: str
    unit: str
    meaning: str
    measure: Callable[[], float]


_declared: dict[str, Figure] = {}


def figure(unit: str) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Declare a figure: the function's name is the figure's name, and it returns the value in `unit`."""

    def declare(measure: Callable[[], float]) -> Callable[[], float]:
        name = measure.__name__
        if name in _declared:
            raise ValueError(f"two figures are called {name}")
        meaning = (measure.__doc__ or "").partition("\n")[0].removeprefix("Return ").rstrip(".")
        _declared[name] = Figure(name=name, unit=unit, meaning=meaning, measure=measure)
        return measure

    return declare


def all_figures() -> tuple[Figure, ...]:
    """Return every figure, in the order of `MODULES` and of their files."""
    for module in MODULES:
        importlib.import_module(f"bench.figures.{module}")
    return tuple(_declared.values())


def pick(figures: Iterable[Figure], names: Iterable[str]) -> tuple[Figure, ...]:
    """Return the figures of these names, in their usual order. Raises `LookupError` when there is no figure of a name."""
    known = {one.name: one for one in figures}
    wanted = set(names)
    if unknown := sorted(wanted - known.keys()):
        raise LookupError(f"no figure is called {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(one for one in known.values() if one.name in wanted)
