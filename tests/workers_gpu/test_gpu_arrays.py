"""Packing lists of floats."""

from __future__ import annotations

import json
import struct
import sys
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.arrays import ArrayError, pack_floats, pack_ints, unpack_floats, unpack_ints

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["dtype", "data", "offsets", "x"]), inner, max_size=4),
    max_leaves=8,
)


def rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Any]]]:
    return st.lists(st.lists(values, max_size=20), max_size=10)


def through_json(packed: Any) -> Any:
    return json.loads(json.dumps(packed))


@given(rows(st.floats(width=32)), rows(st.floats(allow_nan=False)), rows(st.integers(0, 2**31 - 1)))
def test_every_bit_survives_a_round_trip_through_json(single: list[list[float]], double: list[list[float]], ids: list[list[int]]) -> None:
    back = unpack_floats(through_json(pack_floats(single)))
    assert [[struct.pack("<f", value) for value in row] for row in back] == [[struct.pack("<f", value) for value in row] for row in single]
    assert unpack_floats(through_json(pack_floats(double, "float64"))) == double
    assert unpack_ints(through_json(pack_ints(ids))) == ids


def test_the_bytes_are_little_endian_float32() -> None:
    assert pack_floats([[1.0], []]) == {"dtype": "float32", "data": "AACAPw==", "offsets": [0, 1, 1]}


@pytest.mark.parametrize("wrong", ["one", 1e39])
def test_what_is_no_number_of_float32_is_refused_with_the_list_named(wrong: Any) -> None:
    with pytest.raises(ArrayError, match="list 1"):
        pack_floats([[1.0], [wrong]])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("dtype", value) for value in ("float16", ["float32"], "int32")),
        *(("data", value) for value in (5, "!!!!", "AAAA")),
        *(("offsets", value) for value in ([], [0, 4], [1, 3], [0, 3, 1, 3], [False, 3], None)),
    ],
)
def test_a_damaged_value_is_refused_with_the_key_named(key: str, value: object) -> None:
    packed: dict[str, object] = {**pack_floats([[1.0, 2.0, 3.0]])}
    with pytest.raises(ArrayError, match="^" + key):
        unpack_floats({**packed, key: value})


@given(json_values)
def test_any_json_is_unpacked_or_refused(value: object) -> None:
    try:
        unpack_floats(value)  # type: ignore[arg-type]
    except ArrayError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", ">i4"])
def test_arrays_of_any_width_are_the_same_as_lists(dtype: str) -> None:
    numpy = pytest.importorskip("numpy")
    whole = numpy.arange(12, dtype=dtype).reshape(3, 4)
    expected = pack_ints([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    assert pack_ints(whole) == expected
    assert pack_ints([row.tolist() for row in whole]) == expected
    assert pack_ints([list(row) for row in whole]) == expected
    assert pack_ints(numpy.asfortranarray(whole)) == expected
    assert pack_ints([array("q", row.tolist()) for row in whole]) == expected


def test_lists_and_arrays_need_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    assert unpack_ints(pack_ints([[1, 2], array("q", [3]), (4,), range(2), iter([5])])) == [[1, 2], [3], [4], [0, 1], [5]]


@pytest.mark.parametrize("wrong", [[-1], [2**31], [2**70], [1.0], ["1"], [True], [None], [[1]], array("q", [-5]), array("d", [1.0])])
def test_what_is_no_token_id_is_refused_with_the_list_named(wrong: object) -> None:
    with pytest.raises(ArrayError, match="list 1 ") as caught:
        pack_ints([[1], wrong])  # type: ignore[list-item]
    assert caught.value.index == 1


def test_a_table_is_no_sequence_of_ids() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(ArrayError, match="list 0 has 2 dimensions"):
        pack_ints(numpy.zeros((2, 2, 2), dtype=int))
    with pytest.raises(ArrayError, match="list 0 is an array of float64"):
        pack_ints(numpy.zeros((2, 2)))
