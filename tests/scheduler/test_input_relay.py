"""What clients give to commands reaches the node of a command that is theirs, and waits for one that waits."""

from __future__ import annotations

import json

import pytest

from scheduler.live import input_relay
from tangram.wire import GRANT_HEADER, node_queue

from .test_reports import Live, finished


class Given(Live):
    """A service with a node of one core; `sent` are the task, id and number of what goes to the node, in order."""

    @property
    def sent(self) -> list[tuple[str, str, int]]:
        """Return what has gone to the node; an action has the number 0."""
        found = []
        for one in map(json.loads, self.broker.waiting(node_queue("n"))):
            headers, (_, given, _) = one["headers"], json.loads(one["body"])
            found.append(("action", headers["id"], 0) if GRANT_HEADER in headers else (headers["task"], given["id"], given["number"]))
        return found

    def clear(self) -> None:
        """Have the node take all that has gone to it."""
        self.broker.purge(node_queue("n"))

    def give(self, action_id: str, *numbers: int, data: str = "YQ==", **more: str) -> None:
        words = {"id": action_id, "client": "c1", "job": "j1", "sender": "s", **more}
        for number in numbers:
            self.broker.request({"give": {**words, "number": number, "what": ["data", data]}})
        self.service.step()

    def gives(self, action_id: str, *numbers: int) -> list[tuple[str, str, int]]:
        return [("tangram.give", action_id, number) for number in numbers]


@pytest.fixture
def live() -> Given:
    """Return a service with a command that runs and one that waits."""
    live = Given()
    live.submit("runs", "waits", client="c1", job="j1")
    assert live.running == ["runs"]
    live.clear()
    return live


def test_what_is_given_to_a_waiting_command_follows_it_to_its_node(live: Given) -> None:
    live.give("waits", 1, 2)
    assert not live.sent
    live.told(finished("runs"))
    live.give("waits", 3, 3)
    assert live.sent == [("action", "waits", 0), *live.gives("waits", 1, 2, 3, 3)]


def test_what_is_read_before_the_submission_finds_the_command_all_the_same(live: Given) -> None:
    # Given input for two commands that the scheduler reads before it reads the commands, and input of somebody else
    for action_id in ("next", "later"):
        live.give(action_id, 1)
        live.give(action_id, 7, client="c2", job="other")
        live.give(action_id, 2)
    # When they come, and one of them runs
    live.told(finished("runs"), finished("waits"))
    live.clear()
    live.submit("next", "later", client="c1", job="j1")
    # Then the sender's own input has followed it, and so has the other one's, once that runs
    assert live.sent == [("action", "next", 0), *live.gives("next", 1, 2)]
    live.told(finished("next"))
    assert live.sent[3:] == [("action", "later", 0), *live.gives("later", 1, 2)]


def test_what_is_given_to_commands_that_never_come_makes_way(live: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_relay, "EARLY_BYTES", 3000)
    for action_id in ("never", "comes", "other"):
        live.give(action_id, 1, data="x" * 1000)
    live.told(finished("runs"), finished("waits"))
    live.clear()
    live.submit("never", "comes", client="c1", job="j1")
    live.told(finished("never"))
    assert live.sent == [("action", "never", 0), ("action", "comes", 0), *live.gives("comes", 1)]


def test_nothing_reaches_a_command_that_has_ended_or_never_was(live: Given) -> None:
    live.told(finished("runs"))
    live.clear()
    live.give("runs", 1)
    live.give("never", 1)
    assert not live.sent


@pytest.mark.parametrize(("who", "reaches"), [(("c1", "other"), 1), (("c2", "j1"), 1), (("c2", "other"), 0), (("", "other"), 0)])
def test_only_the_client_or_the_job_of_a_command_reaches_it(live: Given, who: tuple[str, str], reaches: int) -> None:
    live.give("runs", 1, client=who[0], job=who[1])
    live.give("waits", 1, client=who[0], job=who[1])
    live.told(finished("runs"))
    assert [task for task, *_ in live.sent].count("tangram.give") == 2 * reaches


def test_what_is_kept_is_bounded_and_has_no_gap(live: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_relay, "MOST_BYTES", 3000)
    for number, size in ((1, 1000), (2, 2000), (3, 4)):
        live.give("waits", number, data="x" * size)
    live.told(finished("runs"))
    assert live.sent == [("action", "waits", 0), *live.gives("waits", 1)]


WRONG: list[dict[str, object]] = [{"what": []}, {"what": ["data", "x" * 200_000]}, {"number": 0}, {"id": ""}, {"sender": "s" * 65}]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_makes_no_sense_is_dropped(live: Given, wrong: dict[str, object]) -> None:
    words: dict[str, object] = {"id": "runs", "client": "c1", "job": "j1", "sender": "s", "number": 1, "what": ["end"]}
    live.asked({"give": words | wrong})
    assert not live.sent
