"""Where a model's weights wait while they are not on a device.

Weights never change, so a copy is written once and kept. Evictions only release device memory.

| devices | the copy is | written | `held_bytes` |
|---|---|---|---|
| CUDA | pinned host memory, which devices read at full speed | by the first start, which loads straight into it | its size |
| CPU | a nameless file: host memory *is* the device, and the process is to shrink | by the first eviction | 0 |

A file counts as no memory held: the kernel drops its cached pages when others need the memory.

A start beside CUDA devices needs the weights on the host anyway, so it reads them into the pinned block, and the first eviction copies
nothing. If host memory has no room for a block at the start, the first eviction writes the copy.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from workers.gpu.engines.pinned import PinnedBlock
from workers.gpu.engines.safetensors_files import read_at
from workers.gpu.engines.side_streams import SideStreams

_IO = 64 << 20


class HostCopy(ABC):
    """A restorable copy of one block."""

    @abstractmethod
    def load(self, blocks: Sequence[torch.Tensor]) -> None:
        """Fill device blocks of the same size, all at the same time; returns once they hold it. Raises `OSError` or `RuntimeError`."""

    @abstractmethod
    def held_bytes(self) -> int:
        """Return the bytes of host memory that the copy holds now."""

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

    def load(self, blocks: Sequence[torch.Tensor]) -> None:
        """Read the file into the CPU blocks, one thread each."""
        if len(blocks) == 1:
            self._read(blocks[0])
            return
        with ThreadPoolExecutor(len(blocks)) as pool:
            list(pool.map(self._read, blocks))

    def held_bytes(self) -> int:
        """Return 0: the process holds nothing."""
        return 0

    def close(self) -> None:
        """Close the file, which removes it."""
        self._file.close()

    def _read(self, block: torch.Tensor) -> None:
        read = read_at(self._file.fileno(), _bytes(block), 0)
        if read < self._size:
            raise OSError(f"the host copy ends after {read} of {self._size} bytes")


class PinnedCopy(HostCopy):
    """A copy in one block of pinned memory, which its maker fills."""

    def __init__(self, size_bytes: int) -> None:
        """Pin room for `size_bytes` bytes. Raises `OSError` or `RuntimeError` where the host has none."""
        self._pinned = PinnedBlock(size_bytes)
        self._streams = SideStreams()

    @property
    def block(self) -> torch.Tensor:
        """The pinned bytes, on the CPU."""
        return self._pinned.block

    def load(self, blocks: Sequence[torch.Tensor]) -> None:
        """Copy to the CUDA blocks, each on its device's side stream."""
        self._streams.copy(self._pinned.block, blocks)

    def held_bytes(self) -> int:
        """Return the bytes that are pinned."""
        return self._pinned.held_bytes()

    def close(self) -> None:
        """Unpin."""
        self._pinned.close()


def _bytes(block: torch.Tensor) -> memoryview:
    """Show a CPU block as bytes, without a copy."""
    return block.numpy().data
