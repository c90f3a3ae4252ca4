"""Output is separate, whole up to the limit, bounded beyond it, and never another command's."""

from __future__ import annotations

import contextlib
import select
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell import output
from workers.cpu.shell.output import Capture, StreamFifo
from workers.cpu.shell.run_memory import RunMemory

from .support import open_one, printed, run


def test_limits_reach_the_command(tmp_path: Path) -> None:
    # Given a sandbox with small limits
    from workers.cpu.process.limits import ProcessLimits

    limits = ProcessLimits(open_files=64, file_size_mb=1)
    box = ProcessSandbox(tmp_path / "box", limits=limits)
    try:
        # When a command asks for its limits, and writes more than it may
        limited = open_one(box)
        assert printed(limited, "ulimit -n") == "64\n"
        assert run(limited, "head -c 2000000 /dev/zero > big").exit_code != 0
        # Then it is held to them
        assert len(limited.read_file("big")) == 1 << 20
    finally:
        box.close()


def test_what_is_printed_while_the_stream_is_looked_at_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a stream on which something is printed just after a poll has found nothing
    fifo = StreamFifo(str(tmp_path), "out")
    with contextlib.closing(Capture(fifo.path, RunMemory().printed[0], 100)) as capture, open(fifo.path, "wb", buffering=0) as writer:

        class Poll:
            def register(self, *_: int) -> None: ...

            def poll(self, _: int) -> list[tuple[int, int]]:
                writer.write(b"printed")
                return []

        monkeypatch.setattr(output, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
        # When it is asked whether the stream was opened; then it was, and nothing is lost
        assert capture.was_opened()
        assert capture.finish()
        assert capture.data == b"printed"
