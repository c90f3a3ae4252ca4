"""A dataclass is filled by the names of its fields, and a field that nobody says is not left to its default."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from scheduler.model.copied import filled, shared


@dataclass
class Kept:
    name: str
    cores: int
    owner: str = ""


@dataclass
class Noted(Kept):
    at: float = 0.0


@dataclass
class Running(Kept):
    node: str = ""


def test_a_value_has_what_is_given_before_what_the_source_says() -> None:
    source = SimpleNamespace(name="a", cores=1, owner="me", more="no field")
    assert filled(Kept, source, cores=2) == Kept("a", 2, "me")


@pytest.mark.parametrize("source", [SimpleNamespace(name="a", cores=1, holder="me"), SimpleNamespace(name="a", cores=1)])
def test_a_field_that_neither_says_is_named_also_where_it_has_a_default(source: SimpleNamespace) -> None:
    with pytest.raises(AttributeError, match="owner"):
        filled(Kept, source)
    assert filled(Kept, source, owner="") == Kept("a", 1)


def test_what_two_classes_share_by_their_base_goes_from_one_to_the_other() -> None:
    assert Running(**shared(Kept, Noted("a", 1, "me", at=2.0)), node="n") == Running("a", 1, "me", "n")
