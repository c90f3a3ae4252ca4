"""`tangram demo` on a machine that other programs keep busy."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from app.cli.demo import MOST_OTHERS, POLICIES, compare, pair_of
from app.local.stack import cores_here
from tangram import TangramError

CALM, BUSY, BUSIER = (part * MOST_OTHERS * cores_here() for part in (0.5, 2.0, 3.0))
FIRST, AGAIN = ["static-1", "elastic"], ["elastic-again", "static-1-again"]


@pytest.mark.parametrize(
    ("others", "folders", "counts"),
    [
        ([CALM, CALM], FIRST, FIRST),
        ([CALM, BUSY, CALM, CALM], FIRST + AGAIN, AGAIN[::-1]),
        ([BUSY, BUSY, CALM, BUSIER], FIRST + AGAIN, FIRST),
    ],
)
def test_on_a_busy_machine_a_second_pair_runs_in_the_other_order_and_the_calmer_one_counts(
    others: list[float], folders: list[str], counts: list[str]
) -> None:
    ran: list[str] = []

    def replay(policy: str, folder: str) -> dict[str, Any]:
        ran.append(folder)
        return {"folder": folder, "others_cores": others[len(ran) - 1]}

    found = pair_of(replay, lambda said: None)
    assert ran == folders
    if others[0] == BUSY:
        ran.clear()
        assert pair_of(replay, lambda said: None, once=True)["elastic"]["folder"] == "elastic"
        assert ran == FIRST
    assert [found[policy]["folder"] for policy in ("static:1", "elastic")] == counts


def test_the_first_pair_counts_where_the_second_one_fails() -> None:
    said = list[str]()

    def replay(policy: str, folder: str) -> dict[str, Any]:
        if folder in AGAIN:
            raise TangramError("there is no room")
        return {"folder": folder, "others_cores": BUSY}

    found = pair_of(replay, said.append)
    assert [found[policy]["folder"] for policy in ("static:1", "elastic")] == FIRST
    assert said[-1] == "there is no room; the first pair counts"


def test_the_verdict_names_the_actions_that_did_not_succeed(tmp_path: Path) -> None:
    def verdict(failed: int) -> str:
        replayed = defaultdict(lambda: 1.0, {"database": "sqlite:///x", "actions": 89, "others_cores": CALM})
        return compare({POLICIES[0]: replayed | {"failed": 0}, POLICIES[1]: replayed | {"failed": failed}}, tmp_path, None).verdict

    assert "67 of 89 actions did not succeed" in verdict(67)
    assert "succeed" not in verdict(0)
