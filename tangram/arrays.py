"""Lists of numbers as one compact JSON-able value.

Log-probs of a batch are thousands of floats; written out as JSON numbers each takes some twenty bytes and as many
again to parse. Here they are float32, little-endian, base64, with the place where every list starts. Only the
standard library is used, so that a trainer needs nothing else. Values become float32: a number loses what
float32 cannot hold. NaN and the infinities survive.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Literal, TypedDict

from tangram.errors import TangramError

_WIDTH = 4


class PackedFloats(TypedDict):
    """Lists of floats, packed.

    `data` is base64 of the float32 values of all lists one after the other; list i is `values[offsets[i]:offsets[i + 1]]`.
    """

    dtype: Literal["float32"]
    data: str
    offsets: list[int]


class ArrayError(TangramError, ValueError):
    """Raised when numbers cannot be packed, or when a packed value is not one."""


def pack_floats(lists: Iterable[Iterable[float]]) -> PackedFloats:
    """Pack lists of floats into one JSON-able value.

    Raises `ArrayError`, naming the list, for what is no number or is finite and too large for float32.
    """
    values, offsets = array("f"), [0]
    for index, numbers in enumerate(lists):
        try:
            exact = array("d", numbers)
        except (TypeError, OverflowError) as error:
            raise ArrayError(f"list {index} holds something that is no number: {error}") from error
        narrow = array("f", exact)
        if any(math.isinf(small) and not math.isinf(large) for small, large in zip(narrow, exact, strict=True)):
            raise ArrayError(f"list {index} holds a number too large for float32")
        values.extend(narrow)
        offsets.append(len(values))
    if sys.byteorder == "big":
        values.byteswap()
    return {"dtype": "float32", "data": base64.b64encode(values.tobytes()).decode("ascii"), "offsets": offsets}


def unpack_floats(packed: Mapping[str, object]) -> list[list[float]]:
    """Return the lists that `pack_floats` was given, as float32 values. Raises `ArrayError` for anything else."""
    if not isinstance(packed, Mapping) or packed.get("dtype") != "float32":
        raise ArrayError("dtype: must be 'float32'")
    values = _values(packed.get("data"))
    offsets = _offsets(packed.get("offsets"), len(values))
    return [values[start:end].tolist() for start, end in pairwise(offsets)]


def _values(data: object) -> array[float]:
    """Decode the base64 text into floats."""
    if not isinstance(data, str):
        raise ArrayError("data: must be base64 text")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ArrayError(f"data: is not base64: {error}") from error
    if len(raw) % _WIDTH:
        raise ArrayError(f"data: {len(raw)} bytes are no whole number of float32 values")
    values = array("f", raw)
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
