"""A dataclass is filled by the names of its fields, and a field that nobody says is not left to its default."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from scheduler.model.copied import filled


@dataclass
class Kept:
    name: str
    cores: int
    owner: str = ""


def test_a_value_has_what_is_given_before_what_the_source_says() -> None:
    source = SimpleNamespace(name="a", cores=1, owner="me", more="no field")
    assert filled(Kept, source, cores=2) == Kept("a", 2, "me")


@pytest.mark.parametrize("source", [SimpleNamespace(name="a", cores=1, holder="me"), SimpleNamespace(name="a", cores=1)])
def test_a_field_that_neither_says_is_named_also_where_it_has_a_default(source: SimpleNamespace) -> None:
    with pytest.raises(AttributeError, match="owner"):
        filled(Kept, source)
    assert filled(Kept, source, owner="") == Kept("a", 1)
