"""A model's weights as one block of bytes, so that they move between host and device as one buffer, not a tensor at a time.

A model is split into a *skeleton*, its modules with empty tensors, and a *layout*, which says where in a block
each parameter and buffer lies. Filling a skeleton from a block makes its tensors views of the block: restoring is
one copy, evicting is letting go of one block, and the same bytes come back.

One block serves all dtypes. A flat buffer per dtype would do the same with more parts: a slot begins at a multiple of
256 bytes (what CUDA's own allocations are aligned to), so any dtype can be viewed in place and kernels find tensors
aligned as they are used to; what is lost to alignment is less than 256 bytes a tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

_ALIGN = 256


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in a block: bytes `start` to `end`."""

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
        """Lay out a model that has its tensors."""
        slots, end = [], 0
        for tensor in _tensors(model):
            start = -(-end // _ALIGN) * _ALIGN
            end = start + tensor.numel() * tensor.element_size()
            slots.append(Slot(start, end, tensor.dtype, tuple(tensor.shape)))
        return cls(tuple(slots), end)

    def take(self, model: nn.Module, block: torch.Tensor) -> None:
        """Move the tensors of a model into a host block of `size_bytes` and leave the skeleton."""
        for slot, tensor in zip(self.slots, _tensors(model), strict=True):
            slot.view(block).copy_(tensor)
            tensor.data = _nothing(tensor)

    def fill(self, skeleton: nn.Module, block: torch.Tensor) -> None:
        """Make the tensors of a skeleton views of the block, on the block's device."""
        for slot, tensor in zip(self.slots, _tensors(skeleton), strict=True):
            tensor.data = slot.view(block)


class Watch:
    """Tells whether the memory of a block is still taken, without keeping it so."""

    def __init__(self, block: torch.Tensor) -> None:
        """Watch the block's storage, which all views of it share."""
        self._size = block.numel()
        self._storage = StorageWeakRef(block.untyped_storage())  # type: ignore[no-untyped-call]

    def held_bytes(self) -> int:
        """Return the block's bytes, or 0 once torch has freed its storage."""
        return 0 if self._storage.expired() else self._size  # type: ignore[no-untyped-call]


def empty(model: nn.Module) -> None:
    """Leave only the skeleton, so that nothing in the model keeps a block alive."""
    for tensor in _tensors(model):
        tensor.data = _nothing(tensor)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Go through parameters and buffers; modules share a tied one as one object, which comes once."""
    return itertools.chain((parameter for _, parameter in model.named_parameters()), (buffer for _, buffer in model.named_buffers()))


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype)
