"""An action on which schedulers fail, over real processes: two of them end, and the third goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.local.processes import Command
from tangram import Action, ActionFailed, Cost
from tests.live.support import Live

BUG = """
from scheduler.core.core import Core
from scheduler.model import events
handle = Core.handle
def with_a_bug(self, event, now):
    out = handle(self, event, now)
    if isinstance(event, events.{event}) and event.id == open({mark!r}).read():
        raise ZeroDivisionError("the bug")
    return out
Core.handle = with_a_bug
from app.cli import main
main()
"""


def spawn(live: Live, event: str, mark: Path, name: str) -> None:
    """Start a scheduler whose core fails on such events of the action that the file `mark` names."""
    argv = (sys.executable, "-c", BUG.format(event=event, mark=str(mark)), "scheduler")
    live.stack.spawn(Command(name, argv, live.command("scheduler").env))


@pytest.mark.parametrize("event", ["Submitted", "Finished"])
def test_an_action_that_breaks_two_schedulers_fails_and_the_others_run(own_stack: Callable[..., Live], tmp_path: Path, event: str) -> None:
    # Given a stack of which each scheduler has a bug that one action meets
    live = own_stack(include=("tests.live.live_tasks",))
    mark = tmp_path / "mark"
    live.process("scheduler").kill()
    live.until(lambda: "scheduler" in live.stack.dead())
    with live.client() as client:

        def submit(number: int) -> Any:
            arguments = {"path": str(tmp_path / "marks"), "word": f"w{number}", "until": ""}
            return client.submit(Action(kind="live.mark", cost=Cost.of(cores=1)).with_arguments(**arguments))

        def ended(name: str) -> bool:
            return name in live.stack.dead()

        handles = [submit(number) for number in range(21)]
        poison = handles.pop(10)
        mark.write_text(poison.id)
        # When two of them have ended for it
        for number in range(2):
            name = f"broken-{number}"
            spawn(live, event, mark, name)
            live.until(partial(ended, name))
            assert "ZeroDivisionError: the bug" in live.log(name)
        spawn(live, event, mark, "third")
        # Then the third has all others run
        assert [handle.result(60) for handle in handles] == [f"w{number}" for number in range(21) if number != 10]
        if event == "Submitted":
            # And the trainer of that one is told
            with pytest.raises(ActionFailed, match="failed on it 2 times"):
                poison.result(60)
        else:
            # And its result, which its worker had stored, stands
            assert poison.result(60) == "w10"
        status = "failed" if event == "Submitted" else "succeeded"
        live.until(lambda: live.rows(f"select status from actions where id = '{poison.id}'") == [(status,)])
        assert live.rows("select failures from failed_messages") == [(2,)]
    assert "third" not in live.stack.dead()
