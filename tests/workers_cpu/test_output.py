"""Output is separate, whole up to the limit, bounded beyond it, and never another command's."""

from __future__ import annotations

import contextlib
import os
import resource
import select
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.sandbox import ProcessSandbox
from workers.cpu.shell import output
from workers.cpu.shell import run as shell_run
from workers.cpu.shell.output import Capture, Drain, StreamFifo

from .support import admit, open_one, printed, run, until


def test_the_streams_are_separate(shell_env: ProcessEnvironment) -> None:
    # Given a command that prints on both streams; when it runs; then each has its own
    outcome = run(shell_env, "echo out; echo err >&2; echo out2")
    assert (outcome.stdout, outcome.stderr) == (b"out\nout2\n", b"err\n")


def test_output_larger_than_every_buffer_arrives_whole(env: ProcessEnvironment) -> None:
    # Given 900,000 bytes on each stream at the same time; when the command runs
    outcome = run(env, "head -c 900000 /dev/zero >&2 & head -c 900000 /dev/zero; wait")
    # Then all is there
    assert (len(outcome.stdout), len(outcome.stderr), outcome.truncated) == (900_000, 900_000, False)


@pytest.mark.parametrize(("printed_bytes", "truncated"), [(99, False), (100, False), (101, True)])
def test_output_is_cut_exactly_at_the_limit(env: ProcessEnvironment, printed_bytes: int, truncated: bool) -> None:
    # Given a limit of 100 bytes; when a command prints about as many
    outcome = admit(env, f"head -c {printed_bytes} /dev/zero", output_limit_bytes=100).wait()
    # Then only what is beyond is cut, and said to be
    assert (len(outcome.stdout), outcome.truncated) == (min(100, printed_bytes), truncated)


def test_a_flood_neither_blocks_the_program_nor_fills_memory(env: ProcessEnvironment) -> None:
    # Given a command that prints 200 MB
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # When it runs with a small limit
    outcome = admit(env, "head -c 200000000 /dev/zero; echo end >&2", output_limit_bytes=1000).wait()
    # Then it comes to its end, and the worker has not grown by more than 20 MB
    assert (outcome.exit_code, outcome.stderr, len(outcome.stdout), outcome.truncated) == (0, b"end\n", 1000, True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 20_000


def test_a_background_process_that_holds_the_output_does_not_delay_the_result(shell_env: ProcessEnvironment) -> None:
    # Given a command that leaves a process with its output open; when it runs
    outcome = run(shell_env, "sleep 300 & echo done")
    # Then it is over before that process
    assert (outcome.status, outcome.stdout) == ("succeeded", b"done\n")


def test_a_background_process_that_prints_without_end_does_not_delay_the_result(shell_env: ProcessEnvironment) -> None:
    # Given a command that leaves `yes` with its output open; when it and the next run
    outcome = admit(shell_env, "yes & echo done >&2", output_limit_bytes=10_000_000).wait()
    # Then both are over at once, and the next is not mixed with it
    assert outcome.stderr == b"done\n"
    assert printed(shell_env, "echo clean") == "clean\n"


def test_late_output_is_not_the_next_commands(shell_env: ProcessEnvironment) -> None:
    # Given a background process that prints during the next command, on both streams
    printed(shell_env, "(while test ! -e go; do sleep 0.01; done; echo late; echo late >&2; touch gone) & :")
    # When the next command makes it print
    outcome = run(shell_env, "touch go; while test ! -e gone; do sleep 0.01; done; echo mine")
    # Then its output is its own
    assert (outcome.stdout, outcome.stderr) == (b"mine\n", b"")


def test_a_background_process_can_go_on_printing(env: ProcessEnvironment) -> None:
    # Given a server that logs more than a pipe holds, after its command is over
    command = "(while test ! -e go; do sleep 0.01; done; head -c 1000000 /dev/zero && touch survived) & :"
    printed(env, command)
    # When later commands run; then it neither blocks nor dies of SIGPIPE
    printed(env, "touch go")
    assert until(lambda: (env.work_folder / "survived").exists())


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
