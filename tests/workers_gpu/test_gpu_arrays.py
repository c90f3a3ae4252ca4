"""Packing lists of floats."""

from __future__ import annotations

import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.arrays import ArrayError, pack_floats, unpack_floats

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "data", "offsets", "x"]), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(st.lists(st.floats(width=32), max_size=20), max_size=10))
def test_float32_values_survive_a_round_trip_through_json(lists: list[list[float]]) -> None:
    packed = json.loads(json.dumps(pack_floats(lists)))

    back = unpack_floats(packed)

    assert [[struct.pack("<f", value) for value in row] for row in back] == [[struct.pack("<f", value) for value in row] for row in lists]


def test_the_bytes_are_little_endian_float32() -> None:
    assert pack_floats([[1.0], []]) == {"dtype": "float32", "data": "AACAPw==", "offsets": [0, 1, 1]}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_a_finite_number_never_becomes_infinite(numbers: list[float]) -> None:
    try:
        (back,) = unpack_floats(pack_floats([numbers]))
    except ArrayError:
        assert max(map(abs, numbers)) > 3.4e38
    else:
        assert all(map(math.isfinite, back))


def test_what_is_no_number_is_refused_with_the_list_named() -> None:
    with pytest.raises(ArrayError, match="list 1"):
        pack_floats([[1.0], ["one"]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "float64"),
        ("data", 5),
        ("data", "!!!!"),
        ("data", "AAAA"),
        ("offsets", []),
        ("offsets", [0, 3]),
        ("offsets", [1, 2]),
        ("offsets", [0, 2, 1, 2]),
        ("offsets", [False, 2]),
        ("offsets", None),
    ],
)
def test_a_damaged_value_is_refused_with_the_key_named(key: str, value: object) -> None:
    packed: dict[str, object] = {**pack_floats([[1.0, 2.0]])}

    with pytest.raises(ArrayError, match=key):
        unpack_floats({**packed, key: value})


@given(json_values)
def test_any_json_is_unpacked_or_refused(value: object) -> None:
    try:
        unpack_floats(value)  # type: ignore[arg-type]
    except ArrayError as error:
        assert len(str(error).splitlines()) == 1
