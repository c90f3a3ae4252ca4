"""Output is separate, whole up to the limit, bounded beyond it, and never another command's."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell import output
from workers.cpu.shell import run as shell_run
from workers.cpu.shell.output import Capture, Drain, StreamFifo

from .support import open_one, printed, run, until


def test_held_streams_are_given_back_when_their_processes_end(tmp_path: Path) -> None:
    # Given a stream handed to the drain, with somebody writing
    fifo, drain = StreamFifo(tmp_path, "out"), Drain()
    capture = Capture(fifo.path, 100)
    with open(fifo.path, "wb", buffering=0) as writer:
        writer.write(b"early")
        assert capture.finish()
        drain.adopt(capture.descriptor)
        # When he writes more; then it is taken
        writer.write(b"x" * 60_000)
        writer.write(b"x" * 60_000)
        assert len(drain) == 1
    # And when he leaves, the stream is closed
    assert until(lambda: len(drain) == 0)
    drain.close()
    assert capture.data == b"early"


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
    fifo = StreamFifo(tmp_path, "out")
    with contextlib.closing(Capture(fifo.path, 100)) as capture, open(fifo.path, "wb", buffering=0) as writer:

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


def test_a_report_counts_that_the_poll_missed(env: ProcessEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a shell that will end just after its report, and a poll that sees its end alone
    printed(env, ":")

    class Poll:
        def __init__(self) -> None:
            self._poller = select.poll()
            self.unregister, self.poll = self._poller.unregister, self._poller.poll

        def register(self, descriptor: int, events: int) -> None:
            if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("/done"):
                self._poller.register(descriptor, events)

    monkeypatch.setattr(shell_run, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLHUP=select.POLLHUP))
    # When a command is over; then it ended as it was reported
    outcome = run(env, """trap 'case $BASH_COMMAND in *export*) kill -9 $$; esac' DEBUG; (exit 3)""")
    assert (outcome.status, outcome.exit_code, outcome.reason) == ("succeeded", 3, "")
