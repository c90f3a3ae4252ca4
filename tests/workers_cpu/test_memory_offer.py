"""What memory a worker offers, and whether it grants it by action, by its settings and by what its sandbox can do."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tangram import Settings
from workers.cpu.memory import offer
from workers.cpu.memory.offer import MemoryOffer
from workers.memory import MIB, usable_mb

TOO_MUCH_MB = 1 << 30
CAN, CANNOT = "", "there is no group in which programs can be frozen"


def offered(problem: str = CAN, **settings: Any) -> tuple[dict[str, Any], str, MemoryOffer]:
    """Return what a node says of its memory, why it books limits, and the offer; its sandbox cannot pause environments for `problem`."""
    made = MemoryOffer(Settings(**settings))
    description: Any = {"memory_mb": made.memory_mb}
    sandbox: Any = SimpleNamespace(memory_problem=problem)
    return description, made.declare(description, sandbox), made


@pytest.mark.parametrize("memory", ["auto", "elastic"])
def test_memory_is_granted_by_action_where_environments_can_be_paused(memory: str) -> None:
    assert offered(memory=memory, memory_mb=100)[:2] == ({"memory_mb": 100, "grants_memory": True}, "")
    # What is granted is used, so the worker offers no more than there is
    assert offered(memory=memory)[0]["memory_mb"] < usable_mb()


@pytest.mark.parametrize(("memory", "level"), [("auto", logging.INFO), ("elastic", logging.WARNING)])
def test_where_they_cannot_limits_are_booked_and_it_is_a_warning_if_that_was_not_asked_for(memory: str, level: int) -> None:
    description, why, made = offered(CANNOT, memory=memory, memory_mb=100)
    assert (description, why, made.level) == ({"memory_mb": 100}, CANNOT, level)


@pytest.mark.parametrize(
    ("memory", "why"),
    [("fixed", ""), ("auto", f"TANGRAM_MEMORY_MB={TOO_MUCH_MB} is more than the {usable_mb()} MB that are there")],
)
def test_a_node_that_is_to_offer_more_than_there_is_books_limits_unless_it_is_to_grant_by_action(memory: str, why: str) -> None:
    description, said, made = offered(memory=memory, memory_mb=TOO_MUCH_MB)
    assert (description, said, made.memory) == ({"memory_mb": TOO_MUCH_MB}, why, "fixed")
    assert offered(memory="elastic", memory_mb=TOO_MUCH_MB)[0]["memory_mb"] < usable_mb()


def test_containers_have_the_memory_of_the_host_not_that_of_the_workers_own_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer, "usable_mb", lambda: 64)
    assert offered(sandbox="process")[0]["memory_mb"] == 56
    assert offered(sandbox="docker")[0]["memory_mb"] >= psutil.virtual_memory().total // MIB * 7 // 8
