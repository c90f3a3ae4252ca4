"""Where a model's weights wait while they are not on a device.

Weights never change, so the copy is written at the first eviction and kept: later evictions only let go of device
memory. Beside CUDA devices the copy is pinned host memory, which the device reads at full speed. Beside CPU
devices, host memory *is* the device; there the copy is a file, so that evicting lets the process shrink.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from pathlib import Path

import torch

_PIECE = 256 << 20
_IO = 64 << 20


class HostCopy(ABC):
    """A restorable copy of one block."""

    @abstractmethod
    def load(self, block: torch.Tensor) -> None:
        """Fill a device block of the same size. Raises `OSError` or `RuntimeError`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the copy takes."""


class FileCopy(HostCopy):
    """A copy in a nameless file: it vanishes with the process, however that ends."""

    def __init__(self, block: torch.Tensor, folder: Path) -> None:
        """Write the CPU block to a file in the folder, which is made if absent. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._size = block.numel()
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - lives until close
        try:
            view = _bytes(block)
            written = 0
            while written < self._size:
                written += self._file.write(view[written : written + _IO])
        except BaseException:
            self._file.close()
            raise

    def load(self, block: torch.Tensor) -> None:
        """Read the file into the CPU block."""
        view = _bytes(block)
        self._file.seek(0)
        read = 0
        while read < self._size:
            count = self._file.readinto(view[read : read + _IO])
            if not count:
                raise OSError(f"the host copy ends after {read} of {self._size} bytes")
            read += count

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()


class PinnedCopy(HostCopy):
    """A copy in pinned memory, in pieces: torch rounds one pinned allocation up to a power of two."""

    def __init__(self, block: torch.Tensor) -> None:
        """Copy the CUDA block. Raises `RuntimeError` where the host has no room."""
        self._pieces = []
        for part in torch.split(block, _PIECE):
            piece = torch.empty(part.numel(), dtype=torch.uint8, pin_memory=True)
            piece.copy_(part, non_blocking=True)
            self._pieces.append(piece)
        torch.cuda.synchronize(block.device)

    def load(self, block: torch.Tensor) -> None:
        """Copy all pieces to the CUDA block."""
        for part, piece in zip(torch.split(block, _PIECE), self._pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        torch.cuda.synchronize(block.device)

    def close(self) -> None:
        """Let go of the pinned memory."""
        self._pieces.clear()


def _bytes(block: torch.Tensor) -> memoryview:
    """Show a CPU block as bytes, without a copy."""
    return block.numpy().data


def keep(block: torch.Tensor, folder: Path) -> HostCopy:
    """Copy a block the way that fits the device it is on; `folder` is for copies in files."""
    return PinnedCopy(block) if block.is_cuda else FileCopy(block, folder)
