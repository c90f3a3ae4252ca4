"""An open that ends early, whatever it opens."""

from __future__ import annotations

import threading

import pytest

from tangram.errors import ActionCancelled, ActionTimedOut
from workers.cpu.opening import Opening


def test_work_that_is_done_just_when_the_open_ends_is_taken_back() -> None:
    opening, undone = Opening(), list[str]()

    def work() -> str:
        opening.cancel("enough")
        return "environment"

    with pytest.raises(ActionCancelled, match="^enough$"):
        opening.run(work, undone.append)
    assert undone == ["environment"]


def test_the_first_end_counts_and_none_after_completion() -> None:
    opening = Opening()
    opening.cancel("first")
    opening.cancel("second")
    with pytest.raises(ActionCancelled, match="^first$"):
        opening.check()
    complete = Opening()
    assert complete.run(lambda: 1, lambda value: None) == 1
    complete.cancel("late")
    complete.check()


def test_an_open_without_a_phase_says_only_that_it_is_out_of_time() -> None:
    opening, never = Opening(0.05), threading.Event()
    with pytest.raises(ActionTimedOut, match=r"^the environment was not open after 0\.05 s$"):
        opening.run(lambda: until_ended(opening, never), lambda value: None)


def until_ended(opening: Opening, never: threading.Event) -> None:
    while not never.wait(0.01):
        opening.check()
