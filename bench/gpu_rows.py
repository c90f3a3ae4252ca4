"""What the checks of a GPU share: rows of the table, where they run, and a few measurements."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.tools import MIB

NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `met` is none where there is no target, or where it is not judged."""

    check: str
    measured: str
    target: str = ""
    met: bool | None = None

    @property
    def mark(self) -> str:
        """What the table says of the target."""
        if self.met is None:
            return NOT_JUDGED if self.target else ""
        return "yes" if self.met else "NO"


@dataclass(frozen=True, slots=True)
class Setup:
    """Where a check runs: a folder of its own, a GPU or stand-ins of it, and the interpreter that has vLLM, if there is one."""

    folder: Path
    stand_ins: bool
    vllm_python: Path | None = None

    @property
    def device(self) -> str:
        """The name of the device in torch."""
        return "cpu" if self.stand_ins else "cuda:0"

    def judged(self, met: bool) -> bool | None:
        """Return whether a target is met that means something on a GPU alone."""
        return None if self.stand_ins else met


def furthest(got: Sequence[float], want: Sequence[float]) -> float:
    """Return the largest distance; infinite where there are not as many numbers, or one is none."""
    if len(got) != len(want) or any(math.isnan(value) for value in got):
        return math.inf
    return max((abs(one - other) for one, other in zip(got, want, strict=True)), default=0.0)


def listed(values_mb: Sequence[float]) -> str:
    """Return figures in MiB as one text."""
    return ", ".join(f"{mb:.0f}" for mb in values_mb) + " MiB"


def process_mb() -> float:
    """Return the resident set of this process, MiB."""
    return float(psutil.Process(os.getpid()).memory_info().rss) / MIB


def cuda_used_mb() -> float:
    """Return what all processes hold of the GPU, by the CUDA runtime."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return float(total - free) / MIB
