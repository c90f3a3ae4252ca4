"""How many machines: what was wanted beyond what is there, over the last hours, and the plan of the last hour."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from app.local.processes import wait_until
from app.web import machines
from scheduler.live.entries import NodeChanged
from tests.journals import new_journal
from tests.web.journals import DESCRIBED, View, action, stand, words_of, write


@pytest.fixture
def journal(tmp_path: Path) -> str:
    """A journal with one node of two cores and 100 MiB."""
    url = new_journal(tmp_path / "tangram.sqlite")
    write(url, NodeChanged(name="n1", state="up", description=DESCRIBED, at=time.time()))
    return url


def test_what_waited_beside_full_cores_is_wanted_beyond_them(view: View, journal: str) -> None:
    # Given a time of slots of 150 s, in the second last of which two cores were held, and two waited for during half of it
    slot = time.time() // 150 * 150 - 150
    write(journal, *action("held", slot, slot, slot + 150), *action("short", slot + 75, slot + 150, slot + 150))
    # an action that waited and one that ran over several slots, of which the second last is a third
    write(journal, *action("waited", slot - 300, slot + 75, slot + 75), *action("waits", slot - 150, units=1))
    # and an environment that holds more than half of the memory, beside one that waits for as much
    stand(journal, "e1", memory_mb=60, at=slot - 600)
    stand(journal, "e2", "waiting", memory_mb=60, at=slot)
    with view() as client:
        found = client.get("/api/machines?hours=1").json()
        page = words_of(client, "/machines?hours=1")
    # Then means are over the slot
    by_start = {each["start"]: each for each in found["slots"]}
    assert found["there"] == {"cores": 2, "cells": 0, "memory_mb": 100} and len(by_start) == 24
    # half a slot of two cores each, and one core all the time
    assert by_start[slot]["cores"] == pytest.approx({"held": 2.0, "waiting": 3.0, "beyond": 3.0})
    # what waits beside idle cores wants no further ones
    assert by_start[slot - 150]["cores"] == pytest.approx({"held": 0.0, "waiting": 3.0, "beyond": 1.0})
    assert by_start[slot - 300]["cores"] == pytest.approx({"held": 0.0, "waiting": 2.0, "beyond": 0.0})
    assert by_start[slot]["memory_mb"]["beyond"] == pytest.approx(20, abs=1)
    assert "3 at most, 2 there" in page and "GPU cells" not in page


def planned(client: TestClient) -> str:
    """Ask for a plan as the page does; return the page that has the answer."""
    assert "fewest on which" not in client.get("/machines").text
    assert client.post("/machines/plan", follow_redirects=False).headers["location"] == "/machines#plan"
    last_hour = client.app.state.last_hour  # type: ignore[attr-defined]
    assert wait_until(lambda: not last_hour.busy, 100)
    # a page that is shown already may be kept for a moment
    assert wait_until(lambda: "Plan again" in client.get("/machines").text, 30)
    return words_of(client, "/machines")


def test_a_plan_of_the_last_hour_is_made_when_somebody_asks(view: View, journal: str) -> None:
    now = time.time()
    write(journal, *chain.from_iterable(action(f"a{number}", now - 600, now - 590, now - 580, units=1) for number in range(20)))
    write(journal, *action("waits", now - 500))
    with view() as client:
        page = planned(client)
    assert "20 cores are the fewest on which" in page
    assert "There are 2 cores" in page and "20 actions of 20 trajectories" in page
    assert "Left out, their time counted as thinking: 1" in page


def test_where_there_is_no_plan_one_line_says_why(view: View, journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with view() as client:
        assert "No plan: 0 actions in the last hour say nothing of its load: 20 do" in planned(client)
    # and a plan that takes too long is ended
    monkeypatch.setattr(machines, "PLAN_S", 0.01)
    with view() as client:
        assert "No plan: it took longer than 0.01 s" in planned(client)
    # and one whose process cannot be started
    monkeypatch.setattr("sys.executable", "/none")
    with view() as client:
        assert "No plan: it could not be begun: No such file or directory" in planned(client)
