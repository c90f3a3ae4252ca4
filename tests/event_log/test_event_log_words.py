"""What is written of events and commands is what is read again, and nothing else is read."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings

from scheduler.live.event_log import BrokenLog, Handled, Opening, decode_line, encode_line
from scheduler.model.commands import Command
from scheduler.model.events import Event, NodeLost, Tick
from tests.event_log.strategies import any_of

OPENING = '{"schema":"tangram.events/4","epoch":1,"setup":{"policy":"fcfs"}}'


@pytest.mark.parametrize("kind", (Opening, *get_args(Event), *get_args(Command)))
def test_each_line_event_and_command_is_read_as_it_was_written(kind: type) -> None:
    # Given any value of a class; when it is written, as a line or in one
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(any_of(kind))
    def holds(value: Any) -> None:
        event, commands = (value, ()) if isinstance(value, get_args(Event)) else (Tick(), (value,))
        line = value if isinstance(value, Opening) else Handled(epoch=1, at=0.5, event=event, commands=commands)
        text = encode_line(line)
        # Then it is one line of ASCII, and says the same
        assert text.isascii() and text.isprintable()
        assert decode_line(text) == line
        assert encode_line(decode_line(text)) == text

    holds()


def test_a_set_is_written_in_order_so_that_equal_logs_are_equal_files() -> None:
    beat = '{"epoch":1,"at":2.0,"event":{"type":"NodeBeat","name":"n","running":["a","b","c"]},"commands":[]}'
    assert encode_line(decode_line(beat)) == beat


def test_what_is_no_text_is_written_so_that_it_can_be_read() -> None:
    # Given a reason with half a surrogate pair, as JSON lets a trainer say it, beside a whole one
    lost = NodeLost(name="n", reason="\ud800 and \N{SNAKE}")
    # When it is written, the line is read, with something in the place of that half
    line = decode_line(encode_line(Handled(epoch=1, at=0.5, event=lost, commands=())))
    assert isinstance(line, Handled) and line.event == NodeLost(name="n", reason="? and \N{SNAKE}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "no object"),
        ('{"schema":"tangram.trace/1"}', "schema is not tangram.events/4"),
        ("{}", "epoch: Field required"),
        (OPENING.replace("fcfs", 'fcfs","colour":"red'), "setup.colour: Unexpected keyword argument"),
        (OPENING.replace('"fcfs"', "7"), "setup.policy: Input should be a valid string, not 7"),
        (OPENING.replace('"epoch":1', '"epoch":"one"'), "epoch: Input should be a valid integer"),
        ('{"epoch":1,"at":"now","event":{"type":"Tick"},"commands":[]}', "at: Input should be a valid number"),
        ('{"epoch":1,"at":1,"event":{"type":"Nonsense"},"commands":[]}', "event: Input tag 'Nonsense'"),
        ('{"epoch":1,"at":1,"event":{"type":"Stop"},"commands":[]}', "event: Input tag 'Stop'"),
        ('{"epoch":1,"at":1,"event":[],"commands":[]}', "event: "),
        ('{"epoch":1,"at":1,"event":{"type":"Tick"},"commands":{}}', "commands: Input should be a valid tuple"),
        ('{"epoch":1,"at":1,"event":{"type":"NodeJoined","node":4},"commands":[]}', "event.NodeJoined.node: Input should be"),
        ('{"epoch":1,"at":1,"event":{"type":"Submitted","id":"a","action":{"kind":""},"submitted_at":1},"commands":[]}', "kind: must be 1"),
        ('{"epoch":1,"at":1,"event":{"type":"Submitted","id":"a","action":7,"submitted_at":1},"commands":[]}', "must be an object"),
        (
            '{"epoch":1,"at":1,"event":{"type":"Finished","id":"a","attempt":1,"status":"odd"},"commands":[]}',
            "event.Finished.status: Input should be 'succeeded'",
        ),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_in_one_line(text: str, problem: str) -> None:
    with pytest.raises(BrokenLog) as caught:
        decode_line(text)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_at_its_default_is_left_out() -> None:
    assert json.loads(encode_line(decode_line(OPENING))) == json.loads(OPENING)
