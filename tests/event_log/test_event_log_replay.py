"""A log that was written by one core leads another to the same commands, and to no others unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.event_log import EventLogFile, main
from scheduler.live.event_log import Setup
from scheduler.model import Limits, NodeSpec, events
from tangram.action import Action, Cost
from tangram.elasticity import Amdahl

SETUP = Setup(policy="elastic", limits=Limits(queue_limit=5, beat_s=1.0, weights={"a": 2.0}))


def submitted(id: str, **fields: object) -> events.Submitted:
    action = Action(kind="some.task", cost=Cost.of(cores=(1, 2, 4)), curve=Amdahl(0.9), job="a", work_s=4.0, **fields)  # type: ignore[arg-type]
    return events.Submitted(id=id, action=action, submitted_at=0.0)


STORY: list[events.Event] = [
    events.NodeJoined(node=NodeSpec(name="cpu", pools=("cpu",), cores=4)),
    submitted("one"),
    submitted("two", idempotent=True),
    events.Started(id="one", attempt=1, at=6.0),
    events.NodeBeat(name="cpu", running=frozenset({"one", "two"})),
    events.Cancelled(ids=("one",), reason="enough"),
    events.Finished(id="one", attempt=1, status="cancelled"),
    events.Tick(),
    events.NodeLost(name="cpu", reason="3 beats missed"),
]
"""Has each kind of command that is carried out. `test_event_log_words.py` has all events."""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Record a story, as two schedulers in turn took it in."""
    path = tmp_path / "events.jsonl"
    for epoch in (1, 2):
        core, log = SETUP.core(), EventLogFile(path, epoch, SETUP)
        for at, event in enumerate(STORY):
            log.handled(event, float(at), core.handle(event, float(at)))
        log.close()
    return path


def test_a_recorded_log_replays_to_the_same_commands(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command["type"] for line in recorded.read_text().splitlines() for command in json.loads(line).get("commands", ())]
    assert set(words) >= {"Start", "Resize", "Stop", "Finish", "Requeue", "NoteNode"}
    assert main([str(recorded)]) == 0
    assert capsys.readouterr().out == f"{2 * len(STORY)} decisions, all equal\n"


def test_the_first_line_that_differs_is_named(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Given a log in which one action has got another core than it did
    lines = recorded.read_text().splitlines(keepends=True)
    number, line = next((number, line) for number, line in enumerate(lines) if '"core_ids":[0' in line)
    lines[number] = line.replace('"core_ids":[0', '"core_ids":[3', 1)
    recorded.write_text("".join(lines))
    assert main([str(recorded)]) == 1
    # Then the line, what it says and what follows now are named
    out = capsys.readouterr().out
    assert out.startswith(f'{recorded}:{number + 1}: the log has [{{"type":"Start","id":"one"')
    assert out.count("\n") == 1
    assert "now it is" in out


@pytest.mark.parametrize(
    ("line", "text", "problem"),
    [
        (3, "nonsense\n", ":3: it is not JSON"),
        (3, "\xff\n", ":3: it is not JSON"),
        (1, '{"epoch":1,"at":0.0,"event":{"type":"Tick"},"commands":[]}\n', ":1: the log has no opening of epoch 1"),
        (1, '{"schema":"tangram.events/4","epoch":1,"setup":{"policy":"odd"}}\n', ":1: policy 'odd' is none of"),
        (2, '{"epoch":1', ":2: it is cut off"),
    ],
)
def test_a_broken_log_is_one_clear_line(recorded: Path, capsys: pytest.CaptureFixture[str], line: int, text: str, problem: str) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    recorded.write_text("".join([*lines[: line - 1], text]))
    assert main([str(recorded)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{recorded}{problem}" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("cut", [-1, -100_000])
def test_a_scheduler_that_takes_over_from_a_killed_one_goes_on_after_its_last_whole_line(
    recorded: Path, capsys: pytest.CaptureFixture[str], cut: int
) -> None:
    # Given a log whose last, perhaps long line was not written to its end
    with recorded.open("a") as file:
        file.write(f'{{"epoch":2,"at":99.0,"event":{{"type":"NodeLost","name":"{"n" * 200_000}","reason":""}},"commands":[]}}'[:cut])
    EventLogFile(recorded, 3, SETUP).close()
    assert main([str(recorded)]) == 0
    assert capsys.readouterr().out == f"{2 * len(STORY)} decisions, all equal\n"
    assert recorded.read_text().count("tangram.events/4") == 3


@pytest.mark.parametrize(("content", "problem"), [(None, "No such file"), (b"", "it is empty"), (b"\x80\n", ":1: it is not UTF-8")])
def test_a_file_that_is_no_log_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, problem: str
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    assert main([str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and problem in said.err and said.err.count("\n") == 1


def test_a_log_that_cannot_be_written_any_more_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    # Given a log on a device that is full
    core, log = SETUP.core(), EventLogFile(Path("/dev/full"), 1, SETUP)
    # When more is noted; then it has said once that it ends
    log.handled(STORY[0], 0.0, core.handle(STORY[0], 0.0))
    log.flush()
    log.close()
    assert [record.getMessage() for record in caplog.records] == ["the event log /dev/full ends here: [Errno 28] No space left on device"]
