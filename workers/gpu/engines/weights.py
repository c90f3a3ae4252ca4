"""A model's weights as one block of bytes, which moves between host and device as one buffer.

A model is split into a *skeleton*, its modules with empty tensors, and a *layout*, the place of each parameter and buffer in the block.
Filling a skeleton from a block makes its tensors views of the block. So a restore is one copy, an eviction lets go of one block, and the
same bytes come back. Both are known before there are weights, from a model on torch's `meta` device. So weights can be read straight into
their places.

One block holds all dtypes. Each slot begins at a multiple of 256 bytes, the alignment of CUDA's own allocations, so every dtype can be
viewed in place. That wastes less than 256 bytes a tensor.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

_ALIGN = 256


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the tensor `name` lies in a block: bytes `start` to `end`."""

    name: str
    start: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the block."""
        return block[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of a model, in the order of its parameters and buffers, tied ones once."""

    slots: tuple[Slot, ...]
    size_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Lay out a model that has its tensors, or knows their shapes (`meta`)."""
        slots, end = [], 0
        for name, tensor in _named(model):
            start = -(-end // _ALIGN) * _ALIGN
            end = start + tensor.numel() * tensor.element_size()
            slots.append(Slot(name, start, end, tensor.dtype, tuple(tensor.shape)))
        return cls(tuple(slots), end)

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor as a view of a block, by name."""
        return {slot.name: slot.view(block) for slot in self.slots}

    def take(self, model: nn.Module, block: torch.Tensor) -> None:
        """Move the tensors of a model into a host block of `size_bytes` and leave the skeleton.

        A tensor that lies in its place already is not copied. Whoever filled the block may have put a tensor into another's place.
        """
        own = block.untyped_storage().data_ptr()
        pairs = zip(self.slots, _tensors(model), strict=True)
        away = [(slot.view(block), tensor) for slot, tensor in pairs if not _is_at(slot.view(block), tensor)]
        # All that lie in others' places are set apart before the first of these is written.
        for _, tensor in away:
            if tensor.untyped_storage().data_ptr() == own:
                tensor.data = tensor.clone()
        for view, tensor in away:
            view.copy_(tensor)
            tensor.data = _nothing(tensor)
        empty(model)

    def fill(self, skeleton: nn.Module, block: torch.Tensor) -> None:
        """Make the tensors of a skeleton views of the block, on the block's device."""
        for slot, tensor in zip(self.slots, _tensors(skeleton), strict=True):
            tensor.data = slot.view(block)


class StorageProbe:
    """Knows whether the memory of a block is still taken, without keeping the block alive."""

    def __init__(self, block: torch.Tensor) -> None:
        """Note the block's storage, which all views of it share."""
        self._size = block.numel()
        self._storage = StorageWeakRef(block.untyped_storage())  # type: ignore[no-untyped-call]

    def held_bytes(self) -> int:
        """Return the block's bytes, or 0 once torch has freed its storage."""
        return 0 if self._storage.expired() else self._size  # type: ignore[no-untyped-call]


def empty(model: nn.Module) -> None:
    """Leave only the skeleton, so that nothing in the model keeps a block alive."""
    for tensor in _tensors(model):
        tensor.data = _nothing(tensor)


def give_back() -> None:
    """Return memory that torch and the C library keep for reuse, so that evicted weights are seen to be gone."""
    torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _is_at(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() == view.data_ptr() and tensor.stride() == view.stride() and tensor.dtype == view.dtype


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over parameters and buffers; a tensor that modules share comes once."""
    return itertools.chain(model.named_parameters(), model.named_buffers())


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in _named(model))


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype)
