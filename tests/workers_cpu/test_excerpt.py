"""What the journal keeps of a command: which ends, how much, and no values of the caller's variables."""

from __future__ import annotations

from typing import Any

import pytest

from workers.cpu.abstract import ExecOutcome, Status
from workers.cpu.excerpt import BLANK, COMMAND_CHARACTERS, LINES, STREAM_CHARACTERS, Kept, excerpt_of


def ended(exit_code: int | None = 1, stdout: bytes = b"", stderr: bytes = b"", status: Status = "succeeded") -> ExecOutcome:
    return ExecOutcome(
        status=status, exit_code=exit_code, stdout=stdout, stderr=stderr, truncated=False, reason="", execution_s=1, cpu_s=1, max_rss_mb=1
    )


def kept(outcome: ExecOutcome, command: str, values: list[str]) -> dict[str, Any]:
    found = excerpt_of(outcome, command, values, "failed")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("outcome", "keeps"),
    [
        (ended(0), {"all": True, "failed": False, "none": False}),
        (ended(1), {"all": True, "failed": True, "none": False}),
        (ended(None, status="failed"), {"all": True, "failed": True, "none": False}),
        (ended(None, status="cancelled"), {"all": True, "failed": True, "none": False}),
    ],
)
def test_the_setting_says_of_which_ends_something_is_kept(outcome: ExecOutcome, keeps: dict[Kept, bool]) -> None:
    for setting, is_there in keeps.items():
        assert (excerpt_of(outcome, "true", [], setting) is not None) is is_there


def test_the_last_lines_are_kept_within_bounds() -> None:
    numbers = "\n".join(map(str, range(1000)))
    found = kept(ended(7, numbers.encode(), b"\xff" + b"x" * 10_000), "y" * 5000, [])
    assert found["stdout"] == "\n".join(map(str, range(1000 - LINES, 1000)))
    assert found["stderr"] == "x" * STREAM_CHARACTERS
    assert len(found["command"]) == COMMAND_CHARACTERS
    assert found["exit_code"] == 7


@pytest.mark.parametrize("before", [0, STREAM_CHARACTERS - 20, STREAM_CHARACTERS * 4 - 20, 100_000])
def test_values_of_variables_are_blanked_out_wherever_they_begin(before: int) -> None:
    secrets = ["topsecret-0123456789-0123456789", "topsecret", "1", "é" * 1000]
    output = ("." * before + "topsecret-0123456789-0123456789 and topsecret 1 " + "é" * 1000).encode()
    found = kept(ended(1, output, output), f"curl -H {secrets[0]}", secrets)
    assert found["command"] == f"curl -H {BLANK}"
    assert found["stdout"] == found["stderr"]
    assert found["stdout"].endswith(f"{BLANK} and {BLANK} 1 {BLANK}")
    assert "0123" not in found["stdout"] and "é" not in found["stdout"]


def test_a_value_that_is_printed_again_and_again_leaves_no_part_of_itself() -> None:
    secret = "0123456789" * 50
    found = kept(ended(1, secret.encode() * 1000), "true", [secret])
    assert not set("0123456789") & set(found["stdout"])


def test_lines_of_a_value_are_blanked_out_where_they_end_otherwise() -> None:
    key = ["-----BEGIN-----\nMIIEpAIB\n-----END-----\n", "\n" * 20]
    found = kept(ended(1, b"-----BEGIN-----\r\nMIIEpAIB\r\n", b"MIIEpAIB is no key"), "echo ' '", key)
    assert (found["command"], found["stdout"], found["stderr"]) == ("echo ' '", f"{BLANK}\n{BLANK}", f"{BLANK} is no key")


def test_what_is_cut_or_overlaps_leaves_no_part_of_a_value() -> None:
    command = "." * (COMMAND_CHARACTERS - 4) + "topsecret"
    found = kept(ended(1, b"topsecretary"), command, ["topsecret", "secretary"])
    assert (found["stdout"], "top" in found["command"], len(found["command"])) == (BLANK, False, COMMAND_CHARACTERS)
