"""The live page over HTTP: what each address answers, and that nothing of it can be abused."""

from __future__ import annotations

import base64
import html
import json
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from app.scheduler_document import SHOWN_TTL_S
from app.web.server import hosts_of, make_app
from scheduler.live.entries import InstanceChanged, NodeChanged
from scheduler.model.commands import NoteDraining
from tangram import Settings
from tangram.connection import open_store
from tangram.wire import ACTION_HEADER, CONTROL_QUEUE, INGRESS_QUEUE, SCHEDULER_KEY
from tests.conftest import RedisUrls
from tests.web.conftest import HOSTILE
from tests.web.journals import DESCRIBED, HEADERS, LOST, SHOWN, TOKEN, View, action, stand, write

LONG = "long-" + "x" * 240
RIGHT_TO_LEFT = "مسار-abc-١٢٣"


@pytest.fixture
def client(view: View, journal: str, redis_urls: RedisUrls) -> Iterator[TestClient]:
    """Return a client of the page whose environment `e` stands, whose node `n2` of one GPU cell is drained, and whose quota is taken."""
    stand(journal, "e")
    described = {**DESCRIBED, "name": "n2", "cells": 1}
    write(journal, NodeChanged(name="n2", state="up", description=described, at=time.time()), NoteDraining(name="n2", draining=True))
    with open_store(redis_urls.result, 5.0) as store:
        store.set(SCHEDULER_KEY, json.dumps(SHOWN), ex=SHOWN_TTL_S)
    with view(web_token=SecretStr(TOKEN)) as client:
        yield client


def text_of(client: TestClient, path: str) -> str:
    """Return a page as its source has it, entities resolved."""
    answer = client.get(path)
    assert answer.status_code == 200, answer.text[:500]
    return html.unescape(answer.text)


def test_an_action_says_why_it_waits_and_for_whom(client: TestClient, journal: str) -> None:
    # Given actions that wait for the cores of a node, for an earlier command of their session, and for a quota
    now, place = time.time(), {"environment": "e", "session": "s"}
    write(journal, *action("waiter", now - 50, header=place), *action("behind", now - 40, header=place))
    for id, granted_at in (("call-0", now - 20), ("call-1", now - 20), ("call-2", None)):
        call = {"kind": "api.call", "cost": {"quota:search": [1]}, "environment": None}
        write(journal, *action(id, now - 30, granted_at, units=0, header=call))
    for name, says, holders in (
        ("waiter", "node n1, where its environment is: 2 of 2 are held.", ["a"]),
        ("behind", "1 earlier one of this session has not ended", ["waiter"]),
        ("call-2", "2 of 2 places of quota search are held.", ["call-0", "call-1"]),
    ):
        page = text_of(client, f"/actions/{name}")
        # Then its page says so, and leads to the holders
        assert says in page
        assert all(f'href="/actions/{holder}"' in page for holder in holders), name


def test_an_action_says_whose_fault_its_end_was_and_what_it_printed_last(client: TestClient, journal: str) -> None:
    now = time.time()
    excerpt = {"command": "echo [variable]; exit 3", "exit_code": 3, "stdout": "", "stderr": "<b>last words"}
    write(journal, *action("lost", now - 60, now - 59, now - 50, **LOST), *action("well", now - 60, now - 59, now - 50))
    write(journal, *action("failing", now - 60, now - 59, now - 50, excerpt=excerpt))
    page = text_of(client, "/actions/lost")
    assert all(words in page for words in ("Fault: <strong>ours</strong>", "node n2 was lost", "For the trainer:"))
    page = text_of(client, "/actions/failing")
    assert all(words in page for words in ("exit 3</bdi>", "Exit code 3.", "<bdi><b>last words</bdi>"))
    assert "<b>last words" not in client.get("/actions/failing").text
    assert "What it ran" not in text_of(client, "/actions/well")


def test_every_page_answers_and_allows_no_script_of_others(client: TestClient, journal: str) -> None:
    write(journal, InstanceChanged(node="n1", service="judge", cell_ids=(0,), state="resident", at=time.time()))
    for path in ("/", "/actions", "/environments", "/health", "/machines", "/jobs/coding", "/nodes/n1", "/nodes/n2", "/services/judge"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200, path
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert " style=" not in answer.text and "onclick" not in answer.text, path
    assert [client.head(path).status_code for path in ("/health", "/ready")] == [200, 200]
    of_cells = ["GPU cells" in client.get(f"/nodes/{name}").text for name in ("n1", "n2")]
    assert of_cells == [False, True]


def test_a_drained_node_says_so_and_can_be_put_back(client: TestClient) -> None:
    word = '<span class="state warn">drained</span>'
    assert word in text_of(client, "/")
    page = text_of(client, "/nodes/n2")
    assert all(words in page for words in (word, "Put this node back", "What runs or stands here comes to its end."))
    assert "Put this node back" not in text_of(client, "/nodes/n1")


@pytest.mark.parametrize("name", [HOSTILE, LONG, RIGHT_TO_LEFT])
def test_names_of_users_are_text(client: TestClient, journal: str, name: str) -> None:
    write(journal, *action("named", time.time(), job=name))
    stand(journal, "named", job=name, trajectory=name)
    pages = [client.get(path) for path in (f"/jobs/{quote(name, safe='')}", "/actions/named", "/", "/environments")]
    for page in pages:
        assert page.status_code == 200
        assert HOSTILE not in page.text and "<img src=x" not in page.text
    assert name in html.unescape(pages[0].text)


@pytest.mark.parametrize("path", ["/actions/none", "/jobs/none", "/environments/none", "/services/none", "/nodes/none", "/nothing"])
def test_what_the_journal_does_not_know_is_said_so(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and "knows nothing at" in answer.text


def test_a_filter_that_makes_no_sense_is_refused(client: TestClient) -> None:
    assert client.get("/actions?page=-1").status_code == 422
    assert client.get(f"/actions?q={'x' * 300}").status_code == 422
    # and in a browser that is a page like all others
    for query in ("page=-1", "hours=soon&page=99999"):
        answer = client.get(f"/actions?{query}", headers={"Accept": "text/html,*/*"})
        assert answer.status_code == 422 and "Not understood" in answer.text and 'aria-label="Pages"' in answer.text
    assert "<bdi>hours</bdi>" in answer.text and "<bdi>page</bdi>" in answer.text


@pytest.mark.parametrize("path", ["/actions/a/cancel", "/environments/e/close", "/nodes/n1/drain"])
def test_who_has_no_token_changes_nothing(client: TestClient, redis_urls: RedisUrls, path: str) -> None:
    answers = [client.post(path), client.post(path, headers={"Authorization": "Bearer wrong"}), client.get(path, headers=HEADERS)]
    assert [answer.status_code for answer in answers] == [401, 401, 404]
    with redis_urls.client() as redis:
        assert not redis.exists(CONTROL_QUEUE, INGRESS_QUEUE)


def test_the_token_does_what_can_be_done(client: TestClient, journal: str, redis_urls: RedisUrls) -> None:
    # Given an action and an environment that have ended, beside those that have not
    now = time.time()
    write(journal, *action("over", now - 9, now - 8, now - 7))
    stand(journal, "gone", "closed")
    for path, code in {
        "/actions/a/cancel": 200, "/actions/over/cancel": 409, "/actions/none/cancel": 404,
        "/environments/e/close": 200, "/environments/gone/close": 409, "/environments/none/close": 404,
        "/nodes/n1/drain": 200, "/nodes/n1/undrain": 409, "/nodes/none/drain": 404, "/nodes/n2/undrain": 200, "/nodes/n2/drain": 409,
    }.items():  # fmt: skip
        assert client.post(path, headers=HEADERS).status_code == code, path
    # Then the scheduler is told of just these
    with redis_urls.client() as redis:
        sent, (closing,) = ([json.loads(raw) for raw in redis.lrange(queue, 0, -1)] for queue in (CONTROL_QUEUE, INGRESS_QUEUE))
    requests = [json.loads(base64.b64decode(message["body"])) for message in reversed(sent)]
    drains = [{"drain": {"node": node, "draining": node == "n1"}} for node in ("n1", "n2")]
    assert requests == [{"cancel": {"ids": ["a"]}}, *drains]
    asked = closing["headers"][ACTION_HEADER]
    assert (asked["kind"], asked["environment"], asked["job"]) == ("cpu.close", "e", "coding")


def test_a_page_of_this_machine_answers_under_no_other_name(journal: str, redis_urls: RedisUrls) -> None:
    settings = Settings(broker_url=redis_urls.broker, result_url=redis_urls.result, database_url=journal)
    with TestClient(make_app(settings, journal, hosts_of("127.0.0.1"))) as client:
        names = ("localhost:80", "127.0.0.1:80", "[::1]:80", "site.example:80", "127.0.0.1.site.example")
        codes = {name: client.get("/", headers={"Host": name}).status_code for name in names}
    assert list(codes.values()) == [200, 200, 200, 400, 400], codes


def test_the_timeline_sends_only_what_has_changed(client: TestClient) -> None:
    whole = client.get("/api/timeline").json()
    held = {bar[8]: bar for bar in whole["bars"] if bar[4] is None}
    assert whole["whole"] and held["a"][1:3] == ["n1", [0, 1]]
    later = client.get(f"/api/timeline?since={whole['version']}").json()
    assert not later["whole"] and "a" not in {bar[8] for bar in later["bars"]}
