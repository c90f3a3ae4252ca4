"""Burn a known amount of CPU: `python -S -E burn.py WORK_S DOP [PARALLEL_FRACTION]`, or `python -m workers.cpu.burn …`.

It stands in for a command when a trace without commands is replayed. By Amdahl's law, the share `1 - PARALLEL_FRACTION`
of WORK_S runs on one process first, then the rest is divided evenly over DOP processes. Work is measured by the CPU time
of each process, so on a core that is shared it takes longer, and never does less. This file is also run by its path:
the standard library only, and no import that is slow.
"""

from __future__ import annotations

import os
import sys
import time

USAGE = "usage: burn.py WORK_S DOP [PARALLEL_FRACTION]"
STEPS_BETWEEN_LOOKS = 2_000


def burn(cpu_s: float) -> None:
    """Use `cpu_s` seconds of CPU time in this thread."""
    end = time.thread_time() + cpu_s
    value = 1
    while time.thread_time() < end:
        for _ in range(STEPS_BETWEEN_LOOKS):
            value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF


def burn_elastic(work_s: float, dop: int, parallel_fraction: float) -> bool:
    """Use `work_s` core-seconds on up to `dop` processes; return False when one of them was killed."""
    burn(work_s * (1.0 - parallel_fraction))
    share_s = work_s * parallel_fraction / dop
    helpers = []
    for _ in range(dop - 1 if share_s > 0 else 0):
        helper = os.fork()
        if helper == 0:
            burn(share_s)
            os._exit(0)
        helpers.append(helper)
    burn(share_s)
    return all([os.waitpid(helper, 0)[1] == 0 for helper in helpers])


def parse(arguments: list[str]) -> tuple[float, int, float]:
    """Return work in core-seconds, DoP and parallel fraction. Raises `ValueError` with one clear line."""
    if len(arguments) not in (2, 3):
        raise ValueError(USAGE)
    try:
        work_s, dop = float(arguments[0]), int(arguments[1])
        parallel_fraction = float(arguments[2]) if len(arguments) == 3 else 1.0
    except ValueError as error:
        raise ValueError(f"{USAGE}: {error}") from None
    if not 0.0 <= work_s < float("inf"):
        raise ValueError(f"WORK_S must be at least 0 seconds, not {arguments[0]}")
    if dop < 1:
        raise ValueError(f"DOP must be at least 1, not {dop}")
    if not 0.0 <= parallel_fraction <= 1.0:
        raise ValueError(f"PARALLEL_FRACTION must be between 0 and 1, not {arguments[2]}")
    return work_s, dop, parallel_fraction


def main(arguments: list[str]) -> int:
    """Burn what the arguments ask for; return the exit code."""
    try:
        work_s, dop, parallel_fraction = parse(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if burn_elastic(work_s, dop, parallel_fraction) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
