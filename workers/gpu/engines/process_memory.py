"""Giving freed memory back to those who lent it: the CUDA driver, the operating system."""

from __future__ import annotations

import ctypes
import sys

import torch


def give_back() -> None:
    """Return memory that torch and the C library keep for reuse, so that what was evicted can be seen to be gone."""
    torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
