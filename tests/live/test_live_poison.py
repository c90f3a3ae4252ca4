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
    if isinstance(event, events.Submitted) and event.id == open({mark!r}).read():
        raise ZeroDivisionError("the bug")
    return out
Core.handle = with_a_bug
from app.cli import main
main()
"""


def spawn(live: Live, mark: Path, name: str) -> None:
    """Start a scheduler whose core fails on the submission of the action that the file `mark` names."""
    argv = (sys.executable, "-c", BUG.format(mark=str(mark)), "scheduler")
    live.stack.spawn(Command(name, argv, live.command("scheduler").env))


def test_an_action_that_breaks_two_schedulers_fails_and_the_others_run(own_stack: Callable[..., Live], tmp_path: Path) -> None:
    # Given a stack of which each scheduler has a bug that one action meets
    live = own_stack(include=("tests.live.live_tasks",))
    mark = tmp_path / "mark"
    live.end("scheduler")
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
            spawn(live, mark, name)
            live.until(partial(ended, name))
            assert "ZeroDivisionError: the bug" in live.log(name)
        spawn(live, mark, "third")
        # Then the third has all others run
        assert [handle.result(60) for handle in handles] == [f"w{number}" for number in range(21) if number != 10]
        # And the trainer of that one is told
        with pytest.raises(ActionFailed, match="failed on it 2 times"):
            poison.result(60)
        live.until(lambda: live.rows(f"select status from actions where id = '{poison.id}'") == [("failed",)])
        assert live.rows("select failures from failed_messages") == [(2,)]
    assert "third" not in live.stack.dead()
