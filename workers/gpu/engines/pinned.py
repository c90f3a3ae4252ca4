"""One block of pinned host memory of exact size, which all CUDA devices read at full speed.

`torch.empty(..., pin_memory=True)` rounds an allocation up to a power of two, so that 9 GB take 16, and keeps it for reuse. Here the
block is a mapping of its own (`mmap`), registered with CUDA in place (`cudaHostRegister`, portable: pinned for every device). It
goes back to the operating system when it is closed.

| from | to | when |
|---|---|---|
| – | mapped | made: pages are promised |
| mapped | pinned | registered with CUDA; if that fails the mapping is closed |
| pinned | closed | unregistered and unmapped |
| pinned | held | closed while something still refers to the block: unregistered, its pages stay until nothing does |
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_PORTABLE = 1


class PinnedBlock:
    """Pinned bytes. `block` shows them as a tensor of uint8."""

    def __init__(self, size_bytes: int) -> None:
        """Map and pin `size_bytes` (1 or more) bytes, all zero. Raises `OSError` or `RuntimeError` where the host has no room."""
        self._size = size_bytes
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise()
        # torch keeps a reference to the memoryview, which keeps the mapping from closing.
        self._block: torch.Tensor | None = torch.frombuffer(memoryview(self._map), dtype=torch.uint8)
        try:
            _register(self._block)
        except BaseException:
            self._block = None
            self._unmap()
            raise

    @property
    def block(self) -> torch.Tensor:
        """The bytes. Raises `RuntimeError` once it is closed."""
        if self._block is None:
            raise RuntimeError("the pinned block is closed")
        return self._block

    def held_bytes(self) -> int:
        """Return the bytes that are mapped now: none once it is closed and nothing refers to them."""
        if self._block is None:
            self._unmap()
        return 0 if self._map.closed else self._size

    def close(self) -> None:
        """Unpin and unmap. No copy may be under way. Idempotent. Raises `RuntimeError` where CUDA refuses."""
        if self._block is not None:
            block, self._block = self._block, None
            try:
                _unregister(block)
            finally:
                del block
                self._unmap()

    def _advise(self) -> None:
        """Ask for large pages, which are pinned faster, and share no pages that devices read with child processes."""
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            # The kernel may not know an advice. Nothing depends on it.
            with contextlib.suppress(AttributeError, OSError):
                self._map.madvise(getattr(mmap, name))

    def _unmap(self) -> None:
        # A mapping with views cannot be closed; `held_bytes` tries again.
        with contextlib.suppress(BufferError):
            self._map.close()


def _register(block: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), _PORTABLE))
    if code:
        _forget_error()
        raise RuntimeError(f"CUDA cannot pin {block.numel() >> 20} MiB of host memory (error {code})")


def _unregister(block: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostUnregister(block.data_ptr()))
    if code:
        _forget_error()
        raise RuntimeError(f"CUDA cannot unpin {block.numel() >> 20} MiB of host memory (error {code})")


def _forget_error() -> None:
    """Clear CUDA's last error by launching a kernel that may fail.

    CUDA keeps an error for its thread, and torch raises it at the thread's next kernel, which may be another service's. The runtime
    binding of torch has no other way to clear it.
    """
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.ones(1, device="cuda")
