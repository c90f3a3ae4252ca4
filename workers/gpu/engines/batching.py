"""Sharing inputs of different length out over devices, in padded batches. Pure: lengths in, indices out."""

from __future__ import annotations

from collections.abc import Sequence

Batch = list[int]


def share_out(lengths: Sequence[int], most_tokens: int, devices: int) -> list[list[Batch]]:
    """Return for each device its batches, which are lists of indices of `lengths`, each index exactly once.

    Inputs of like length go together, so that a batch, padded to its longest, has at most `most_tokens` tokens; an input
    longer than that is a batch of its own. Devices get like numbers of inputs and like mixtures of lengths.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [_batches(order[device::devices], lengths, most_tokens) for device in range(devices)]


def _batches(order: Sequence[int], lengths: Sequence[int], most_tokens: int) -> list[Batch]:
    """Cut indices, longest input first, into batches within the bound."""
    batches: list[Batch] = []
    for index in order:
        current = batches[-1] if batches else []
        if current and (len(current) + 1) * lengths[current[0]] <= most_tokens:
            current.append(index)
        else:
            batches.append([index])
    return batches
