"""Copying weights to CUDA devices while other services compute on them.

Every engine has one stream on each device for its weights alone. A copy is ordered as follows:

1. The side stream waits for the work that is already queued on the block's own stream, since torch may reuse memory whose last reader is
   still queued there. Later work on that stream waits for nothing.
2. The block is registered with the side stream (`record_stream`), so that its memory is not reused during a copy, even if the copy
   is given up.
3. The host waits for one event on each device, never for a whole device. When `copy` returns, every stream sees the weights.

A copy goes in pieces of 64 MiB. A device's copy engine takes one command at a time, and the token ids of other services would otherwise
wait for gigabytes of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE = 64 << 20


class SideStreams:
    """The streams of one engine, made when first needed. One copy at a time."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, pinned: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
        """Copy pinned bytes to a block on each of several devices, at the same time, and wait until they are there."""
        ends = []
        try:
            for block in blocks:
                ends.append(self._begin(pinned, block))
        finally:
            # Also after an error: the pinned bytes must not be freed while a device reads them.
            for end in ends:
                end.synchronize()

    def _begin(self, pinned: torch.Tensor, block: torch.Tensor) -> torch.cuda.Event:
        """Queue the copy to one block; return the event of its end."""
        stream, end = self._stream(block.device), torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(block.device))
        block.record_stream(stream)
        try:
            with torch.cuda.stream(stream):
                for piece, source in zip(torch.split(block, PIECE), torch.split(pinned, PIECE), strict=True):
                    piece.copy_(source, non_blocking=True)
        except BaseException:
            stream.synchronize()
            raise
        end.record(stream)
        return end

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]
