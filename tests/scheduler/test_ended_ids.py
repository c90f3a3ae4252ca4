"""What ids of ended actions a scheduler remembers."""

from __future__ import annotations

from scheduler.live.ended_ids import REMEMBERED, EndedIds


def test_the_last_ids_are_remembered_whatever_came_before_them_and_whatever_comes_twice() -> None:
    ended = EndedIds()
    assert "never" not in ended
    ids = [f"action-{number}" for number in range(3 * REMEMBERED)]
    for action_id in ids:
        ended.add(action_id)
        ended.add(ids[0])
    assert ids[0] in ended
    assert all(action_id in ended for action_id in ids[-REMEMBERED:])
    assert not any(action_id in ended for action_id in ids[1 : REMEMBERED - 1])
    assert "never" not in ended
