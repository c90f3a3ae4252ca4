"""A dataclass is filled by the names of its fields, and a field that nobody says is not left to its default."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from scheduler.model.copied import filled, shared


@dataclass
class Kept:
    name: str
    owner: str = ""


@dataclass
class Running(Kept):
    node: str = ""


def test_a_value_has_what_is_given_before_what_the_source_says_and_no_field_is_left_to_its_default() -> None:
    assert filled(Kept, SimpleNamespace(name="a", owner="me", more="no field"), name="b") == Kept("b", "me")
    with pytest.raises(AttributeError, match="owner"):
        filled(Kept, SimpleNamespace(name="a", holder="me"))
    assert filled(Kept, SimpleNamespace(name="a"), owner="") == Kept("a")
    assert shared(Kept, Running("a", "me", "n")) == {"name": "a", "owner": "me"}
