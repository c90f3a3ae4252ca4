"""Tensors in safetensors files, read straight into where they are to be.

The library reads a whole tensor into memory of its own first, or maps the file, whose pages then count as memory of the worker. Here the
bytes go to their place at once. Where the place has another dtype, they go through a small buffer that converts them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE = 1 << 18
_IO = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of an open file."""

    tensor: Any
    """The library's view of it: `get_shape`, `get_dtype`, and by index the tensor itself."""
    file: int
    start: int
    """Where its bytes begin in the file."""

    def fits(self, view: torch.Tensor) -> bool:
        """Say whether it can be read into a view."""
        return list(view.shape) == self.tensor.get_shape() and self.tensor.get_dtype() in _DTYPES

    def read_into(self, view: torch.Tensor) -> torch.Tensor:
        """Fill a contiguous CPU tensor of its shape, and return that. Raises `OSError`."""
        held, flat = _DTYPES[self.tensor.get_dtype()], view.view(-1)
        if held == view.dtype:
            self._read(flat, 0)
            return view
        buffer = torch.empty(min(_PIECE, flat.numel()), dtype=held)
        for first in range(0, flat.numel(), _PIECE):
            piece = buffer[: flat.numel() - first]
            self._read(piece, first * held.itemsize)
            flat[first : first + len(piece)] = piece
        return view

    def _read(self, into: torch.Tensor, at: int) -> None:
        view = into.view(torch.uint8).numpy().data
        if read_at(self.file, view, self.start + at) < len(view):
            raise OSError("the file ends within a tensor")


@contextmanager
def stored_tensors(files: list[Path]) -> Iterator[dict[str, Stored]]:
    """Open safetensors files and give their tensors by name. Raises `OSError` and what the library raises for a damaged file."""
    found: dict[str, Stored] = {}
    with ExitStack() as opened:
        for path in files:
            # The library checks the header. It keeps to itself where tensors begin.
            tensors = opened.enter_context(safe_open(path, framework="pt", device="cpu", backend="pread"))
            file = opened.enter_context(path.open("rb", buffering=0))
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                found[name] = Stored(tensors.get_slice(name), file.fileno(), 8 + length + header[name]["data_offsets"][0])
        yield found


def read_at(file: int, into: memoryview, at: int) -> int:
    """Read bytes of a file from a place of its own, since its position is shared by all readers; return how many there were."""
    read = 0
    while read < len(into) and (count := os.preadv(file, [into[read : read + _IO]], at + read)):
        read += count
    return read
