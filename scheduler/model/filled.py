"""A value that says again what another one says: the same fields, under the same names."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

_ABSENT = object()


def filled(kind: type[D], source: object, **given: Any) -> D:
    """Return a dataclass: its fields are those `given`, and what `source` has under their names. Others keep their defaults."""
    said = {name: getattr(source, name, _ABSENT) for name in _names(kind) if name not in given}
    return kind(**{name: value for name, value in said.items() if value is not _ABSENT}, **given)


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
