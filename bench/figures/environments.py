"""Figures of what an environment of a process sandbox costs, without and with bubblewrap; `bench/environments.py` measures them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from shutil import which

from bench import environments
from bench.figures.registry import figure
from bench.tools import NotMeasured

MEANINGS = {
    "alone_ms": "time of an open and a first command, one environment after the other",
    "alone_cpu": "CPU time of an environment with one command, one after the other",
    "crowd_ms": "time until each of 200 environments at once has had a command, over their number",
    "crowd_cpu": "CPU time of one of 200 environments at once, with one command",
    "crowd_mib": "memory of one of 200 environments at once",
}
_measured = cache(environments.medians)


def _declare(isolation: str, name: str) -> None:
    def measure() -> float:
        if isolation == "bubblewrap" and which("bwrap") is None:
            raise NotMeasured("bubblewrap is not installed")
        return _measured(isolation)[name][0]

    named: Callable[[], float] = measure
    named.__name__ = f"environment_{name}" + ("_bubblewrap" if isolation == "bubblewrap" else "")
    named.__doc__ = f"Return {MEANINGS[name]}{', with bubblewrap' if isolation == 'bubblewrap' else ''}."
    figure(environments.UNITS[name])(named)


for _isolation in environments.ISOLATIONS:
    for _name in environments.UNITS:
        _declare(_isolation, _name)
