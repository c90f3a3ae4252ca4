"""What a command is given is handed on once and in order, however its messages come."""

from __future__ import annotations

import base64
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram import InvalidAction
from tangram.wire import GIVEN_BYTES
from workers.cpu.abstract import Data, EndOfInput, Given, Signal, WindowSize
from workers.cpu.command_input import MOST_EARLY, CommandInputs, parse


def words(data: bytes) -> list[str]:
    return ["data", base64.b64encode(data).decode()]


@given(st.permutations(range(6)), st.lists(st.integers(0, 5), max_size=6), st.integers(0, 6))
def test_messages_come_once_and_in_order_also_before_their_command(order: list[int], again: list[int], early: int) -> None:
    inputs, found = CommandInputs(), list[Given]()
    messages = [*order, *again]
    for number in messages[:early]:
        inputs.take("a", "s", number + 1, words(b"%d" % number))
    with inputs.to("a", found.append):
        for number in messages[early:]:
            inputs.take("a", "s", number + 1, words(b"%d" % number))
    assert found == [Data(b"%d" % number) for number in range(6)]


def test_nothing_is_handed_on_over_a_gap_and_senders_are_counted_apart() -> None:
    inputs, found = CommandInputs(), list[Given]()
    with inputs.to("a", found.append):
        inputs.take("a", "s", 2, words(b"second"))
        inputs.take("a", "t", 1, ["end"])
        assert found == [EndOfInput()]
        inputs.take("a", "s", 1, words(b"first"))
        assert found == [EndOfInput(), Data(b"first"), Data(b"second")]


def test_a_command_that_has_ended_takes_nothing_and_leaves_nothing() -> None:
    inputs, found = CommandInputs(), list[Given]()
    with inputs.to("a", found.append):
        pass
    inputs.take("a", "s", 1, ["end"])
    assert not found and not inputs._commands
    # Of commands that never come, the oldest are forgotten
    for number in range(2 * MOST_EARLY):
        inputs.take(f"never-{number}", "s", 1, ["end"])
    assert len(inputs._commands) == MOST_EARLY


def test_messages_are_read_or_refused() -> None:
    assert [parse(what) for what in (["end"], ["signal", 2], ["size", 24, 80])] == [EndOfInput(), Signal(2), WindowSize(24, 80)]
    data = (["data"], ["data", "?"], words(b"x" * (GIVEN_BYTES + 1)))
    signals, sizes = (["signal", 0], ["signal", 99], ["signal", "2"]), (["size", 0, 80], ["size", 24, 1 << 16], ["size", 24])
    for what in (*data, *signals, *sizes, ["end", 1], ["other"], []):
        with pytest.raises((InvalidAction, ValueError)):
            parse(what)


def test_what_makes_no_sense_is_passed_over() -> None:
    inputs, found = CommandInputs(), list[Given]()
    with inputs.to("a", found.append):
        for number, what in zip(itertools.count(1), (["other"], ["end"]), strict=False):
            inputs.take("a", "s", number, what)
    assert not found
