"""How an operator finds things: what needs attention, since when; search; lists that sort; the five questions in one click each."""

from __future__ import annotations

import json
import re
import time
from itertools import chain
from typing import Any
from urllib.parse import quote

import pytest

from app.scheduler_document import SHOWN_TTL_S
from app.web.attention import RESOLVED_S, Attention, Notice, notices
from app.web.formats import clock
from scheduler.live.entries import NodeChanged
from scheduler.model.commands import NoteDraining
from tangram.connection import open_store
from tangram.life_signs import LONGEST_SILENCE_S
from tangram.wire import CLIENT_KEY_PREFIX, SCHEDULER_KEY
from tests.conftest import RedisUrls
from tests.web.journals import DESCRIBED, LOST, SHOWN, View, action, seen, stand, words_of, write


def be_in_trouble(journal: str, redis_urls: RedisUrls) -> float:
    """Write of a lost node, a job that loses actions, one that floods, and a trainer that fell silent; return when that was."""
    now = time.time()
    described = {**DESCRIBED, "name": "n2"}
    write(journal, *(NodeChanged(name="n2", state=state, description=described, reason="lost", at=now - 300) for state in ("up", "lost")))
    write(journal, *action("lost-1", now - 200, now - 190, now - 150, **LOST), *action("lost-2", now - 200, now - 190, now - 120, **LOST))
    write(journal, *chain.from_iterable(action(f"w{number:03}", now - 90, job="flooding") for number in range(100)))
    stand(journal, "left", job="gone", client="c-gone", owner="host-9:77", at=now - 500)
    with open_store(redis_urls.result, 5.0) as store:
        store.set(CLIENT_KEY_PREFIX + "c-gone", LONGEST_SILENCE_S * 1000, px=(LONGEST_SILENCE_S - 60) * 1000)
        store.set(SCHEDULER_KEY, json.dumps(SHOWN), ex=SHOWN_TTL_S)
    return now


def test_the_five_questions_of_an_operator_take_one_click_each(view: View, journal: str, redis_urls: RedisUrls) -> None:
    be_in_trouble(journal, redis_urls)
    with view() as client:
        first = client.get("/").text
        for link, says in (
            # Why does it wait?
            ("/oldest?job=flooding&amp;kind=cpu.exec", "Why it waits"),
            # Which job loses rewards to us?
            ("/jobs/unlucky", "Lost to our failures"),
            # Which node is sick?
            ("/nodes/n2", "Failures on it"),
            # Who floods?
            ("/actions?state=waiting&amp;job=flooding", "100 actions match."),
            # How many machines?
            ("/machines", "How many machines"),
        ):
            assert f'href="{link}"' in first, link
            assert says in words_of(client, link.replace("&amp;", "&"))
        # and where nothing waits, the age of the oldest leads to their list
        assert "None." in words_of(client, "/oldest?job=nobody&kind=cpu.exec")


def test_what_needs_attention_says_since_when_the_newest_fault_first(view: View, journal: str, redis_urls: RedisUrls) -> None:
    now = be_in_trouble(journal, redis_urls)
    with view() as client:
        page = words_of(client, "/health")
    assert f"2 of 2 actions to our failures in the last hour: 2 × node_lost. since {clock(now - 150)}, last {clock(now - 120)}" in page
    assert f"Job flooding floods: 100 of 100 waiting actions are its own. since {clock(now - 90)}" in page
    silent = re.search(r"Trainer host-9:77 has given no sign of life for 1 min \d+ s\. Its 1 environment in job gone", page)
    faults = [page.index(text) for text in ("Job unlucky lost", "Node n2 has been lost", "Job flooding floods")]
    assert silent and faults == sorted(faults)


def test_what_needs_attention_no_longer_is_resolved_for_an_hour_or_until_it_does_again(journal: str) -> None:
    # Given a node that drains while somebody looks
    attention, write_draining = Attention(), lambda draining: write(journal, NoteDraining(name="n1", draining=draining))
    write(journal, NodeChanged(name="n1", state="up", description=DESCRIBED, at=time.time()))

    def resolved_at(now: float, *, draining: bool) -> list[tuple[str, float | None]]:
        write_draining(draining)
        attention.see(notices(seen(journal, SHOWN)), now, has_scheduler=True)
        return [(notice.about, notice.resolved) for notice in attention.resolved]

    # When it is put back, drains again, and is put back again; then it is resolved from each time on
    assert resolved_at(100.0, draining=True) == []
    assert resolved_at(160.0, draining=False) == resolved_at(200.0, draining=False) == [("draining n1", 160.0)]
    assert resolved_at(220.0, draining=True) == []
    assert resolved_at(240.0, draining=False) == [("draining n1", 240.0)]
    assert resolved_at(241.0 + RESOLVED_S, draining=False) == []


def test_what_only_a_scheduler_can_find_is_not_resolved_while_there_is_none(journal: str) -> None:
    attention, throttled = Attention(), {**SHOWN, "quotas": {"search": {**SHOWN["quotas"]["search"], "throttle": "closed"}}}

    def resolved(shown: dict[str, Any] | None) -> list[str]:
        attention.see(notices(seen(journal, shown)), time.time(), has_scheduler=shown is not None)
        return [notice.about for notice in attention.resolved]

    assert resolved(throttled) == resolved(None) == resolved(throttled)[1:] == []
    assert resolved(SHOWN) == ["quota search", "scheduler"]


def test_a_queue_waits_since_it_was_first_long_whichever_action_is_the_oldest_now(journal: str) -> None:
    attention, now = Attention(), time.time()

    def since(oldest: str, at: float) -> list[float | None]:
        write(journal, *action(oldest, at))
        found = attention.see(notices(seen(journal, SHOWN)), now, has_scheduler=True)
        return [notice.since for notice in found if notice.about.startswith("wait")]

    # When the oldest one is gone and another one is the oldest
    first = since("w1", now - 300)
    write(journal, *action("w1", now - 300, now - 200, now - 100))
    assert first == since("w2", now - 200) != []
    # And as long as it goes on waiting it comes after what is newer
    attention = Attention()

    def order(waits_since: float) -> list[str]:
        found = [Notice(about=about, level="warn", text=about, since=since) for about, since in (("wait", waits_since), ("lost n", 50.0))]
        return [notice.about for notice in attention.see(found, 100.0, has_scheduler=True)]

    assert order(10.0) == order(90.0) == ["lost n", "wait"]


def test_a_job_alone_floods_nobody(journal: str) -> None:
    write(journal, *chain.from_iterable(action(f"w{number:03}", time.time() - 1) for number in range(100)))
    assert not [notice.text for notice in notices(seen(journal, SHOWN)) if "floods" in notice.text]


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("a", "/actions/a"),
        ("e", "/environments/e"),
        ("coding", "/jobs/coding"),
        (" n1 ", "/nodes/n1"),
        ("t", "/actions?trajectory=t&hours=24"),
        ("no/such", "/actions?q=no%2Fsuch&hours=24"),
    ],
)
def test_search_leads_to_what_is_called_so(view: View, journal: str, name: str, page: str) -> None:
    stand(journal, "e")
    with view() as client:
        assert client.get(f"/search?q={quote(name)}", follow_redirects=False).headers["location"] == page


def test_the_list_of_actions_sorts_and_counts_and_has_commands(view: View, journal: str) -> None:
    # Given an action of the fixture that runs, a short one that failed, and 60 longer ones
    now = time.time()
    excerpt = {"command": "exit <3>", "exit_code": 3, "stdout": "", "stderr": ""}
    write(journal, *action("short", now - 30, now - 29, now - 28, status="failed", excerpt=excerpt))
    write(journal, *chain.from_iterable(action(f"long-{number:02}", now - 100 - number, now - 50, now - 10) for number in range(60)))
    with view() as client:

        def ids(query: str) -> list[str]:
            return re.findall(r'data-key="([^" ]+)"', client.get(f"/actions{query}").text.partition("<tbody>")[2])

        # Then it sorts by what is pressed, over all pages
        assert ids("?sort=act")[0] == "short" and ids("?sort=-act")[0] == "long-59"
        assert ids("?sort=act&page=1")[-1] == "a" and len(ids("?sort=act&page=1")) == 12
        assert ids("?sort=submitted")[0] == "long-59" and ids("?sort=-submitted&state=failed") == ["short"]
        assert client.get("/actions?sort=header").status_code == 422
        # and says how many there are, and what the command was
        words = words_of(client, "/actions")
        assert "62 actions match." in words and "1 action matches." in words_of(client, "/actions?state=failed")
        text = client.get("/actions?state=failed&job=coding").text
        assert "<code><bdi>exit &lt;3&gt;</bdi></code>" in text and clock(now - 30) in text and ">of-short</bdi>" in text
        # and its filters are chosen from what there is
        assert "<option selected>coding</option>" in text and "<option>cpu.exec</option>" in text


def test_the_red_of_our_failures_is_not_that_of_others(view: View, journal: str) -> None:
    now = time.time()
    for cause in ("node_lost", "disk_limit"):
        write(journal, *action(cause, now - 30, now - 29, now - 28, **{**LOST, "cause": cause, "status": "failed"}))
    with view() as client:
        classes = [
            re.findall('class="state ([a-z]*)">failed', client.get(f"/actions/{cause}").text) for cause in ("node_lost", "disk_limit")
        ]
        bars = {bar[8]: bar[10] for bar in client.get("/api/timeline").json()["bars"]}
    assert classes == [["bad"], ["theirs"]] and bars["node_lost"] == "infrastructure" and bars["disk_limit"] == "program"
