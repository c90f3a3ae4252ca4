"""Checks that end well, badly, or not at all."""

from __future__ import annotations

import os
import signal

from bench.gpu_rows import Row, Setup


def good(setup: Setup) -> list[Row]:
    return [Row("good", "1 of 1", "all", True), Row("a figure", "3 s")]


def slow(setup: Setup) -> list[Row]:
    return [Row("a rate", "2 GB/s", "at least 3", setup.judged(False))]


def missed(setup: Setup) -> list[Row]:
    return [Row("missed", "0 of 1", "all", False)]


def broken(setup: Setup) -> list[Row]:
    raise RuntimeError("no such luck")


def endless(setup: Setup) -> list[Row]:
    (setup.folder.parent.parent / "endless").write_text(str(os.getpid()))
    while True:
        signal.pause()
