"""Output is separate, whole up to the limit, bounded beyond it, and never another command's."""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.workers_cpu.support import admit, followed, printed, run, until
from workers.cpu.abstract import Environment
from workers.cpu.errors import NoSuchFile


def exists(environment: Environment, path: str) -> bool:
    try:
        environment.read_file(path)
    except NoSuchFile:
        return False
    return True


def held_bytes() -> int:
    """Return how much this process holds in files in memory."""
    held = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(path := f"/proc/self/fd/{descriptor}").startswith("/memfd:"):
                held += 512 * os.stat(path).st_blocks
    return held


def test_output_larger_than_every_buffer_arrives_whole(env: Environment) -> None:
    outcome = run(env, "head -c 900000 /dev/zero >&2 & head -c 900000 /dev/zero; wait")
    assert (len(outcome.stdout), len(outcome.stderr), outcome.truncated) == (900_000, 900_000, False)


@pytest.mark.parametrize(("printed_bytes", "truncated"), [(99, False), (100, False), (101, True)])
def test_output_is_whole_up_to_the_limit(env: Environment, printed_bytes: int, truncated: bool) -> None:
    outcome = admit(env, f"head -c {printed_bytes} /dev/zero", output_limit_bytes=100).wait()
    assert (outcome.stdout.count(b"\0"), outcome.truncated) == (min(100, printed_bytes), truncated)


@pytest.mark.parametrize(("fraction", "head", "tail"), [(0.5, 500, 500), (0.25, 750, 250), (0.0, 1000, 0), (1.0, 0, 1000)])
def test_of_a_flood_the_beginning_and_the_end_are_kept(env: Environment, fraction: float, head: int, tail: int) -> None:
    flood = "head -c 10000 /dev/zero | tr '\\0' a; head -c 2000000 /dev/zero; head -c 10000 /dev/zero | tr '\\0' z; echo end >&2"
    outcome = admit(env, flood, output_limit_bytes=1000, output_tail_fraction=fraction).wait()
    left_out = b"\n[2019000 bytes are left out here: TANGRAM_OUTPUT_LIMIT_BYTES]\n"
    assert (outcome.exit_code, outcome.stderr, outcome.truncated) == (0, b"end\n", True)
    assert outcome.stdout == b"a" * head + left_out + b"z" * tail


def test_what_is_left_out_is_followed_all_the_same(env: Environment) -> None:
    flood = "for each in a b c; do head -c 2000000 /dev/zero | tr '\\0' $each; done"
    with followed(env, flood, output_limit_bytes=1000) as command:
        assert command.outcome().exit_code == 0
    assert command.seen["stdout"] == b"a" * 2_000_000 + b"b" * 2_000_000 + b"c" * 2_000_000


def test_memory_of_what_was_printed_is_given_back_once_the_end_is_told(env: Environment) -> None:
    before = held_bytes()
    execution = admit(env, "head -c 900000 /dev/zero")
    assert execution.wait().exit_code == 0 and held_bytes() >= before + 900_000
    execution.note_told()
    assert held_bytes() < before + 100_000
    assert printed(env, "echo next") == "next\n"


@pytest.mark.parametrize("holder", ["sleep 300", "yes"])
def test_a_background_process_that_holds_the_output_does_not_delay_the_result(shell_env: Environment, holder: str) -> None:
    outcome = admit(shell_env, f"{holder} & echo done >&2", output_limit_bytes=10_000_000).wait()
    assert (outcome.status, outcome.stderr) == ("succeeded", b"done\n")
    assert printed(shell_env, "echo clean") == "clean\n"


@pytest.mark.parametrize("ends", ["exit 3", "set -e; (exit 3); :", "kill $$; sleep 30", "exec 1>&2; exit 3"])
def test_the_last_words_of_a_trap_are_the_commands(shell_env: Environment, ends: str) -> None:
    outcome = run(shell_env, f"trap 'exit 3' TERM; trap 'echo out; echo err >&2' EXIT; {ends}")
    streams = (b"", b"out\nerr\n") if "1>&2" in ends else (b"out\n", b"err\n")
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (3, *streams)
    assert printed(shell_env, "echo next") == "next\n"


def test_late_output_is_not_the_next_commands(shell_env: Environment) -> None:
    printed(shell_env, "(while test ! -e go; do sleep 0.01; done; echo late; echo late >&2; touch gone) & :")
    outcome = run(shell_env, "touch go; while test ! -e gone; do sleep 0.01; done; echo mine")
    assert (outcome.stdout, outcome.stderr) == (b"mine\n", b"")


def test_a_background_process_can_go_on_printing(env: Environment) -> None:
    printed(env, "(while test ! -e go; do sleep 0.01; done; head -c 1000000 /dev/zero && touch survived) & :")
    printed(env, "touch go")
    assert until(lambda: exists(env, "survived"))
