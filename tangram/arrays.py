"""Lists of numbers as one compact JSON-able value.

Log-probs of a batch are thousands of floats, its token ids as many integers; written out as JSON numbers each takes up to
twenty bytes and as many again to parse. Here they are little-endian numbers of fixed width, base64, with the place where
every list starts. Only the standard library is needed; arrays of numpy are taken as they are where a trainer has it.

| dtype | holds | keeps |
|---|---|---|
| `float32` | log-probs | what float32 can hold; NaN and the infinities survive |
| `float64` | scores | every bit |
| `int32` | token ids, 0 or more | every id that a vocabulary can have |
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypedDict, TypeVar

from tangram.errors import TangramError

T = TypeVar("T")

FloatType = Literal["float32", "float64"]

_CODES = {"float32": "f", "float64": "d", "int32": "i"}
_MOST = (1 << 31) - 1


class PackedFloats(TypedDict):
    """Lists of floats, packed.

    `data` is base64 of the values of all lists one after the other; list i is `values[offsets[i]:offsets[i + 1]]`.
    """

    dtype: FloatType
    data: str
    offsets: list[int]


class PackedInts(TypedDict):
    """Lists of whole numbers, 0 or more, packed as floats are."""

    dtype: Literal["int32"]
    data: str
    offsets: list[int]


class PackedRanked(TypedDict):
    """Log-probs of given ids, their ranks, and the most likely ids at their positions.

    Lists i of `logprobs` and `ranks` are as long as each other. Lists i of `top_ids` and `top_logprobs` have as many numbers for each
    position, the positions one after the other.
    """

    logprobs: PackedFloats
    ranks: PackedInts
    top_ids: PackedInts
    top_logprobs: PackedFloats


class ArrayError(TangramError, ValueError):
    """Raised when numbers cannot be packed, or when a packed value is not one. `index` is the list it was, where known."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message if index is None else f"list {index} {message}")
        self.index = index
        self.problem = message


def pack_floats(lists: Iterable[Iterable[float]], dtype: FloatType = "float32") -> PackedFloats:
    """Pack lists of floats into one JSON-able value.

    Raises `ArrayError`, naming the list, for what is no number or is finite and too large for float32.
    """
    values: array[float] = array("d" if dtype == "float64" else "f")
    offsets = [0]
    for index, numbers in enumerate(lists):
        try:
            exact = array("d", numbers)
        except (TypeError, OverflowError) as error:
            raise ArrayError(f"holds something that is no number: {error}", index) from error
        values.extend(exact if dtype == "float64" else _narrowed(exact, index))
        offsets.append(len(values))
    return {"dtype": dtype, "data": _text(values), "offsets": offsets}


def unpack_floats(packed: Mapping[str, object]) -> list[list[float]]:
    """Return the lists that `pack_floats` was given, as values of its dtype. Raises `ArrayError` for anything else."""
    return _unpacked(packed, ("float32", "float64"))


def pack_ints(lists: Iterable[Iterable[int]]) -> PackedInts:
    """Pack lists of whole numbers from 0 to 2**31 - 1 into one JSON-able value.

    A list may also be an `array.array`, a numpy array or whatever numpy reads as one, of one dimension; where numpy is
    imported, such values never become Python integers. Raises `ArrayError`, naming the list, for what is no such number.
    """
    values, offsets = array("i"), [0]
    for index, numbers in enumerate(lists):
        try:
            values.extend(_ids(numbers))
        except (TypeError, ValueError, OverflowError) as error:
            raise ArrayError(str(error) if isinstance(error, _Wrong) else f"holds something that is no token id: {error}", index) from error
        offsets.append(len(values))
    return {"dtype": "int32", "data": _text(values), "offsets": offsets}


def unpack_ints(packed: Mapping[str, object]) -> list[list[int]]:
    """Return the lists that `pack_ints` was given. Raises `ArrayError` for anything else."""
    return _unpacked(packed, ("int32",))


def by_position(values: Sequence[T], positions: int) -> list[Sequence[T]]:
    """Cut a list of as many numbers for each position into one for each. Raises `ArrayError` where that does not come out even."""
    if len(values) % positions if positions else values:
        raise ArrayError(f"offsets: {len(values)} numbers are not as many for each of {positions} positions")
    each = len(values) // positions if positions else 0
    return [values[place * each : (place + 1) * each] for place in range(positions)]


class _Wrong(ValueError):
    """A message of ours about a list of ids."""


def _ids(numbers: Any) -> array[int]:
    """Return whole numbers as int32, whatever they came as."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and (isinstance(numbers, array) or hasattr(numbers, "__array__")):
        return _ids_of_numpy(numpy, numpy.asarray(numbers))
    listed = numbers if isinstance(numbers, list | tuple) else list(numbers)
    if not set(map(type, listed)) <= {int}:
        listed = [_whole(number) for number in listed]
    if listed and not 0 <= min(listed) <= max(listed) <= _MOST:
        raise _out_of_range(min(listed), max(listed))
    return array("i", listed)


def _ids_of_numpy(numpy: Any, numbers: Any) -> array[int]:
    if numbers.ndim != 1:
        raise _Wrong(f"has {numbers.ndim} dimensions: it must have one")
    if numbers.size and numbers.dtype.kind not in "iu":
        raise _Wrong(f"is an array of {numbers.dtype}: it must be one of whole numbers")
    if numbers.size and not 0 <= numbers.min() <= numbers.max() <= _MOST:
        raise _out_of_range(int(numbers.min()), int(numbers.max()))
    return array("i", numpy.ascontiguousarray(numbers, dtype=numpy.int32).tobytes())


def _whole(number: Any) -> int:
    """Return what counts as a whole number as one; neither truth values nor floats do."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise _Wrong(f"holds {str(number)[:40]!r}, which is no token id")
    return int(number.__index__())


def _out_of_range(least: int, most: int) -> _Wrong:
    return _Wrong(f"holds {least if least < 0 else most}: token ids are from 0 to {_MOST}")


def _narrowed(exact: array[float], index: int) -> array[float]:
    narrow = array("f", exact)
    infinite = math.inf in narrow or -math.inf in narrow
    if infinite and any(math.isinf(small) and not math.isinf(large) for small, large in zip(narrow, exact, strict=True)):
        raise ArrayError("holds a number too large for float32", index)
    return narrow


def _text(values: array[Any]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values).decode("ascii")


def _unpacked(packed: Mapping[str, object], dtypes: Sequence[str]) -> list[list[Any]]:
    if not isinstance(packed, Mapping) or packed.get("dtype") not in dtypes:
        raise ArrayError(f"dtype: must be {' or '.join(map(repr, dtypes))}")
    values = _values(packed.get("data"), str(packed["dtype"]))
    offsets = _offsets(packed.get("offsets"), len(values))
    return [values[start:end].tolist() for start, end in pairwise(offsets)]


def _values(data: object, dtype: str) -> array[Any]:
    """Decode the base64 text into numbers."""
    if not isinstance(data, str):
        raise ArrayError("data: must be base64 text")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ArrayError(f"data: is not base64: {error}") from error
    values: array[Any] = array(_CODES[dtype])
    if len(raw) % values.itemsize:
        raise ArrayError(f"data: {len(raw)} bytes are no whole number of {dtype} values")
    values.frombytes(raw)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _offsets(offsets: object, total: int) -> list[int]:
    """Check that the offsets are whole, never fall, begin at 0 and end with the last value."""
    if not isinstance(offsets, list) or not offsets:
        raise ArrayError("offsets: must be a list that begins with 0")
    checked = [offset for offset in offsets if isinstance(offset, int) and not isinstance(offset, bool)]
    if len(checked) != len(offsets):
        raise ArrayError("offsets: must be whole numbers")
    if checked[0] != 0 or checked[-1] != total or any(start > end for start, end in pairwise(checked)):
        raise ArrayError(f"offsets: must rise from 0 to {total}, the number of values")
    return checked
