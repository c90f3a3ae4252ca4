"""The rows of the compatibility matrix.

Rows of the gateway's shapes are made of the tables that stand beside the tests of these shapes; those of classes are in `class_rows.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OUTCOMES = ("works", "differs", "missing")
Table = tuple[tuple[str, ...], ...]
"""Methods of a client: the method, how it goes here, and the tests that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A claim about a method of a client, and the tests that show it."""

    client: str
    version: str
    method: str
    outcome: str
    how: str = ""
    """What differs, why it is missing, or what is worth knowing though it works."""
    environment: str = "project"
    tests: tuple[str, ...]
    """The ids of pytest nodes."""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES or not self.tests or (self.outcome != "works" and not self.how):
            raise ValueError(f"{self.client} {self.method}: {self.outcome!r} with {self.how!r} and {len(self.tests)} tests is no row")


def said(how: str) -> dict[str, str]:
    """Split what a table says, such as `works; with a note`, `differs: …` or `refused: …`, into the fields of a row."""
    if how.startswith("works"):
        return {"outcome": "works", "how": how.removeprefix("works").lstrip(":;, ")}
    if how.startswith("differs: "):
        return {"outcome": "differs", "how": how.removeprefix("differs: ")}
    return {"outcome": "missing", "how": how}


def rows() -> list[Row]:
    """Return all rows, those of a client together."""
    from tests.clients import class_rows, gateway_rows

    return [*gateway_rows.rows(), *class_rows.rows()]


def node(file: str, *names: str) -> tuple[str, ...]:
    """Return the ids of tests below `tests/`: by their names where they are in one file, those of other files by file and name."""
    return tuple(f"tests/{name}" if "::" in name else f"tests/{file}.py::{name}" for name in names)


def tests_of(chosen: Iterable[Row]) -> list[str]:
    """Return the tests of some rows, each once, those of a file together."""
    return sorted({test for row in chosen for test in row.tests})
