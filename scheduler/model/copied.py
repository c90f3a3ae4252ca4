"""A value that says again what another one says: the same fields, under the same names."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")


def filled(kind: type[D], source: object, **given: Any) -> D:
    """Return a dataclass: its fields are those `given`, and what `source` has under their names.

    Raises `AttributeError` for a field that is neither, also where it has a default: a field that got another name is not to be lost.
    """
    return kind(**{name: getattr(source, name) for name in _names(kind) if name not in given}, **given)


def shared(base: type[DataclassInstance], source: object) -> dict[str, Any]:
    """Return the fields of `base` as `source` has them, by name: for another class that has `base` as its base, too."""
    return {name: getattr(source, name) for name in _names(base)}


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
