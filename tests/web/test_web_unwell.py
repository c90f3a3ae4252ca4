"""What an operator sees when the deployment is unwell: on the page, in `tangram top` and in `tangram envs`, whatever their width."""

from __future__ import annotations

import asyncio
import html
import json
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import Response
from pydantic import SecretStr
from rich.console import Console
from sqlalchemy import Engine, event
from starlette.testclient import TestClient

from app.cli.top import page as top_page
from app.journal.database import open_engine, snapshot
from app.journal.lanes import Lanes
from app.journal.overview import read_present
from app.local.processes import wait_until
from app.scheduler_document import SHOWN_TTL_S, read_shown
from app.web.attention import notices
from app.web.shared_looks import Looks
from scheduler.live.entries import ActionGranted, ActionReceived, ActionResized, NodeChanged
from scheduler.model.commands import NoteDraining
from tangram.connection import open_store
from tangram.wire import SCHEDULER_KEY
from tests.cli.forked import forked
from tests.conftest import RedisServer, RedisUrls
from tests.web.journals import DESCRIBED, HEADERS, SHOWN, TOKEN, View, seen, stand, write


def test_a_node_without_isolation_is_named(journal: str) -> None:
    (notice,) = notices(seen(journal, SHOWN))
    assert notice.text.startswith("Node n1 runs commands without isolation") and notice.link == "/nodes/n1"


def test_a_scheduler_that_has_died_is_named_before_it_is_forgotten(journal: str, redis_urls: RedisUrls) -> None:
    # Given a scheduler that has not shown itself for 20 s, by the result store's clock
    with open_store(redis_urls.result, 5.0) as store:
        assert read_shown(store) is None
        store.set(SCHEDULER_KEY, json.dumps(SHOWN), ex=SHOWN_TTL_S - 20)
        shown = read_shown(store)
    assert shown is not None and 20 <= shown["shown_ago_s"] < 60
    first = notices(seen(journal, shown))[0]
    assert first.level == "bad" and first.text.startswith("The scheduler has not shown itself for ")


def test_cores_of_one_host_are_not_counted_as_used_for_each_of_its_nodes(journal: str) -> None:
    def used(labels: list[str]) -> object:
        described = {**DESCRIBED, "domains": [[0, 1]], "labels": labels}
        write(
            journal, *(NodeChanged(name=name, state="up", description={**described, "name": name}, at=time.time()) for name in ("n1", "n2"))
        )
        return seen(journal, {**SHOWN, "nodes": {name: {"beat_ago_s": 0.2, "busy_cores": 2.0} for name in ("n1", "n2")}})["cores"]["used"]

    assert used([]) == 4.0
    assert used(["host:here"]) is None


def test_a_nodes_loss_its_failures_and_its_silence_are_named_each(journal: str) -> None:
    # Given a node that has missed two beats of ten seconds, in figures that are 30 s old, and one that was lost two days ago
    long_ago = time.time() - 172_800
    write(journal, *(NodeChanged(name="n2", state=state, description={**DESCRIBED, "name": "n2"}, at=long_ago) for state in ("up", "lost")))
    nodes = {"n1": {"beat_ago_s": 21.0, "busy_cores": None}}
    document = seen(journal, {**SHOWN, "beat_s": 10.0, "shown_ago_s": 30.0, "nodes": nodes})
    for node in document["nodes"]:
        node.update(ours=1, ended=2, causes={"node_lost": 1})
    texts = [notice.text for notice in notices(document)]
    # Then the beat is as old as the figures and more, and nothing hides another
    assert "Node n1 last beat 51.0 s ago." in texts
    assert any(text.startswith("Node n2 has been lost for 2 d 0 h") for text in texts), texts
    assert [text for text in texts if "failed 1 of 2 actions" in text] == [
        f"Node {name} failed 1 of 2 actions in the last hour (node_lost)." for name in ("n1", "n2")
    ]
    # and the state of a silent node goes with it
    write(journal, NodeChanged(name="n1", state="silent", description=DESCRIBED, at=time.time()))
    silent = [notice.text for notice in notices(seen(journal, {**SHOWN, "beat_s": 10.0, "nodes": nodes})) if "last beat" in notice.text]
    assert silent == ["Node n1 last beat 21.0 s ago. It is silent: nothing begins there, and what it holds waits for it."]
    # and no node is called silent because the scheduler is
    beating = {**SHOWN, "beat_s": 10.0, "shown_ago_s": 30.0, "nodes": {"n1": {"beat_ago_s": 5.0, "busy_cores": None}}}
    assert not any("last beat" in notice.text for notice in notices(seen(journal, beating)))


def test_a_job_that_is_held_back_and_a_node_that_rests_are_named(journal: str) -> None:
    stand(journal, "e1")
    write(journal, ActionReceived(id="a", header={"kind": "build", "job": "coding"}, message="", submitted_at=1.0, received_at=1.0))
    nodes = {"n1": {"beat_ago_s": 0.2, "busy_cores": None, "rests_s": 20.0}}
    held = {"coding": {"waiting": 12, "ours": 6, "ended": 21, "held_s": 4.0, "next_in_s": 3.0}}
    document = seen(journal, {**SHOWN, "nodes": nodes, "held_back": held})
    found = {notice.about: notice for notice in notices(document)}
    assert found["held coding"].text == (
        "Job coding is held back: 6 of 21 actions failed by our fault within a minute. 12 wait, one is tried in 3.0 s."
    )
    assert (found["held coding"].level, found["held coding"].since) == ("bad", document["at"] - 4.0)
    assert found["rest n1"].text == "Node n1 rests for 20.0 s: environments could not be opened there, or died there."


def test_a_result_store_that_is_gone_is_not_a_scheduler_that_is_gone(view: View, own_redis: RedisServer) -> None:
    with open_store(own_redis.result, 5.0) as store:
        store.set(SCHEDULER_KEY, json.dumps(SHOWN), ex=SHOWN_TTL_S)
    with view(result_url=own_redis.result) as client:
        before = html.unescape(client.get("/").text)
        assert "No scheduler" not in before and "runs commands without isolation" in before and ">full<" in before
        # When the result store goes, and a look is taken after that
        own_redis.stop()
        assert wait_until(lambda: client.get("/ready").status_code != 200, 100)
        answer = client.get("/")
    # Then the page says so, and does not say that no scheduler is active
    assert answer.status_code == 200
    assert "The result store cannot be read" in answer.text and "No scheduler is active" not in answer.text
    assert "Traceback" not in answer.text


async def test_the_page_sees_again_soon_after_the_result_store_has_hung(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given looks that may take a thousandth of the time, and a result store that stands still for longer than it is waited for
    monkeypatch.setattr("app.web.shared_looks.INTERVAL_S", 0.01)
    monkeypatch.setattr("app.web.shared_looks.MOST_PAUSE_S", 600.0)
    monkeypatch.setattr("app.web.shared_looks.LOOKING_FRACTION", 0.001)
    engine = open_engine(journal)
    with socket.create_server(("127.0.0.1", 0)) as mute, open_store(f"redis://127.0.0.1:{mute.getsockname()[1]}/0", 0.2) as store:
        looks = Looks(engine, store)
        first = await looks.after(0)
        assert first.problem.startswith("the result store cannot be read: ")
        # Then the timeout is not taken for the cost of looking, which the next look would follow minutes later
        assert (await asyncio.wait_for(looks.after(first.version), 60)).version == first.version + 1
        looks.close()
    engine.dispose()


class Searches:
    """Counts the questions for `zzzz` to any database, and has each of them wait, for at most `takes_s`."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s, self.count, self.may_go_on = takes_s, 0, threading.Event()

    def __call__(self, _connection: object, _cursor: object, _statement: str, parameters: object, *_: object) -> None:
        if "zzzz" in str(parameters):
            self.count += 1
            self.may_go_on.wait(self.takes_s)


@contextmanager
def searching(takes_s: float) -> Iterator[Searches]:
    searches = Searches(takes_s)
    event.listen(Engine, "before_cursor_execute", searches)
    yield searches
    searches.may_go_on.set()
    event.remove(Engine, "before_cursor_execute", searches)


def test_searches_that_take_long_hold_up_no_other_page(view: View) -> None:
    with searching(200) as searches, view() as client, ThreadPoolExecutor(40) as viewers:
        answers = [viewers.submit(client.get, f"/actions?q=zzzz{number}") for number in range(40)]
        assert wait_until(lambda: searches.count >= 2, 60)
        pages = [client.get(path).status_code for path in ("/", "/nodes/n1", "/ready")]
        # Then other pages answer, and only a few of the searches are under way
        count = searches.count
        searches.may_go_on.set()
        assert pages == [200] * 3 and count == 2
        assert {answer.result(100).status_code for answer in answers} == {200}


def test_a_search_that_took_long_is_not_repeated_at_each_look(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given pages that may take a ten thousandth of the time, and a search that took so long that it is kept for minutes
    monkeypatch.setattr("app.web.pages.LOOKING_FRACTION", 1e-4)
    with searching(0.1) as searches, view() as client:
        client.get("/actions?q=zzzz&state=failed")
        count = searches.count
        # When it is asked for at two further looks
        for _ in range(2):
            assert client.portal is not None
            looks = client.app.state.looks  # type: ignore[attr-defined]
            client.portal.call(looks.after, client.portal.call(looks.now).version)
            client.get("/actions?q=zzzz&state=failed")
        assert count and searches.count == count


def test_a_terminal_tells_a_result_store_that_is_gone_from_a_scheduler_that_is_gone(
    journal: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    urls = {"TANGRAM_BROKER_URL": own_redis.broker, "TANGRAM_RESULT_URL": own_redis.result, "TANGRAM_DATABASE_URL": journal}

    def said(*words: str) -> str:
        done = forked(*words, cwd=tmp_path, COLUMNS="300", **urls)
        assert done.returncode == (3 if words[0] == "status" else 0) and not done.stderr, done.stderr
        return done.stdout

    # Given a result store without a scheduler in it
    top, status = said("top"), said("status")
    assert "no scheduler shows itself" in top and "No scheduler is active: nothing is granted." in top
    assert "no scheduler is active" in status
    # When it takes nothing, though it answers; then both say so
    with open_store(own_redis.result, 5.0) as store:
        store.config_set("maxmemory", 1)
        top, status = said("top"), " ".join(said("status").split())
        store.config_set("maxmemory", 0)
    assert "The result store takes nothing: " in top
    assert status.startswith("the result store takes nothing: ")
    # When that is gone
    own_redis.stop()
    top, status = said("top"), " ".join(said("status").split())
    # Then both say so, and not that no scheduler is active
    assert "The result store cannot be read: Error 2 connecting to" in top and status.startswith("the result store cannot be read: ")
    assert "o scheduler" not in top and "o scheduler" not in status
    # And top shows the journal also where nobody says which store it is
    unknown = forked("top", cwd=tmp_path, COLUMNS="300", TANGRAM_DATABASE_URL=journal)
    assert (unknown.returncode, unknown.stderr) == (0, "") and "The result store cannot be read: " in unknown.stdout
    # and the figures of the journal are there, the same for programs
    assert "n1" in top and "n1" in status
    assert json.loads(said("status", "--json"))["scheduler"] is None


def test_a_journal_that_is_gone_is_said_on_a_page(view: View, journal: str) -> None:
    with view() as client:
        assert client.get("/").status_code == 200
        # When the database is there, but its tables are not
        engine = open_engine(journal)
        with engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE actions RENAME TO elsewhere")
        engine.dispose()
        assert wait_until(lambda: client.get("/ready").status_code != 200, 100)
        answer = client.get("/")
    assert answer.status_code == 503
    assert "The deployment cannot be read" in answer.text and "Traceback" not in answer.text


def test_lists_say_what_an_action_holds_now(view: View, journal: str) -> None:
    def row_of(client: TestClient, path: str) -> str:
        return client.get(path).text.partition('data-key="a"')[2].partition("</tr>")[0]

    # Given a command that has two cores, and had one at first
    paths = ("/actions?state=running", "/environments/e", "/nodes/n1", "/jobs/coding")
    stand(journal, "e")
    with view() as client:
        assert [">2</td>" in row_of(client, path) for path in paths] == [True] * 4
    # When it is sent to the background
    now = time.time()
    write(journal, ActionResized(id="a", attempt=1, core_ids=(), units=2, background=True, at=now))
    # Then every list says so, and its page says who has the cores
    header = {"kind": "cpu.exec", "cost": {"cores": [2]}, "job": "other", "trajectory": "t", "environment": "e2"}
    write(
        journal,
        ActionReceived(id="b", header=header, message="", submitted_at=now, received_at=now),
        ActionGranted(id="b", attempt=1, node="n1", units=2, core_ids=(0, 1), cell_ids=(), granted_at=now),
    )
    with view() as client:
        assert [">background</td>" in row_of(client, path) for path in paths] == [True] * 4
        page = client.get("/actions/a").text
        assert "Why it is in the background" in page and "node n1, where its environment is: 2 of 2 are held." in page
        assert 'href="/actions/b"' in page and "Why it is in the background" not in client.get("/actions/b").text


def test_an_environment_says_when_its_lease_ends_and_whose_it_is(view: View, journal: str, redis_urls: RedisUrls) -> None:
    # Given a system whose lease is ten minutes, environments with a lease of their own, with the system's, and one that has ended
    with open_store(redis_urls.result, 5.0) as store:
        store.set(SCHEDULER_KEY, json.dumps({**SHOWN, "lease_s": 600.0}), ex=SHOWN_TTL_S)
    now = time.time()
    stand(journal, "own", client="c1", owner="host-17:14828", ends_at=now + 7200, used_at=now - 5)
    stand(journal, "common", owner="gateway:e2b", used_at=now - 120)
    stand(journal, "e", used_at=now - 120)
    stand(journal, "gone", "closed", client="c2", ends_at=now - 9, used_at=now - 120)
    with view() as client:
        pages = {name: html.unescape(client.get(f"/environments/{name}").text) for name in ("own", "common", "e", "gone")}
    # Then each says how long its own lease goes, and only while it stands
    assert re.search(r"; it is closed in (2 h 0|1 h 59) min, used or not<", pages["own"])
    assert re.search(r"; it is closed in (8 min 0|7 min \d+) s unless it is used<", pages["common"])
    assert re.search(r"; it is closed in (10 min 0|9 min \d+) s unless it is used<", pages["e"]), "an action runs there"
    assert "it is closed" not in pages["gone"]
    # and whose it is, by the name for people where there is one
    assert "host-17:14828" in pages["own"] and "c1" not in pages["own"] and "gateway:e2b" in pages["common"] and "c2" in pages["gone"]


def test_what_cannot_be_sent_is_no_success(view: View, journal: str, own_redis: RedisServer) -> None:
    stand(journal, "e")
    with view(broker_url=own_redis.broker, web_token=SecretStr(TOKEN), connect_timeout_s=0.5) as client, ThreadPoolExecutor() as people:

        def post(path: str) -> Response:
            return client.post(path, headers=HEADERS)

        # Given a page that has reached the broker once, at whichever attempt: on a busy machine 0.5 s may not do for the first
        assert wait_until(lambda: post("/nodes/n1/drain").status_code == 200, 60)
        own_redis.stop()
        answers = people.map(post, ("/nodes/n1/drain", "/actions/a/cancel", "/environments/e/close"))
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert re.fullmatch("the broker at .* is unreachable.*", answer.json()["error"]), answer.text


class Slow(socketserver.BaseRequestHandler):
    """Hands what comes on to a server, each part after a while, until it is told to be in time: every answer is, but not all together."""

    upstream: Path
    in_time: threading.Event

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(self.upstream))
            while said := self.request.recv(65536):
                self.in_time.wait(0.4)
                server.sendall(said)
                self.request.sendall(server.recv(65536))


def test_a_broker_that_is_too_slow_leaves_no_threads_behind(view: View, redis_urls: RedisUrls) -> None:
    before = set(threading.enumerate())

    def of_clients() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if name in ("tangram-publish", "tangram-feed")]

    # Given a broker that is not ready for a client within the time that there is
    class Handler(Slow):
        upstream, in_time = redis_urls.socket, threading.Event()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as slow:
        slow.daemon_threads = True
        threading.Thread(target=slow.serve_forever, daemon=True).start()
        broker = f"redis://127.0.0.1:{slow.server_address[1]}/0"
        with view(broker_url=broker, web_token=SecretStr(TOKEN), connect_timeout_s=0.5) as client:
            answer = client.post("/nodes/n1/drain", headers=HEADERS)
            # Then the answer is one line, and what had begun comes to its end
            assert answer.status_code == 503, answer.text
            # whichever of the two limits of 1 s is over first: that of the page, or that of the connection
            said = r"the broker (gave no answer in 1 s|at redis://\S+ is unreachable: Timeout reading from socket)"
            assert re.fullmatch(said, answer.json()["error"]), answer.text
            Handler.in_time.set()
            assert wait_until(lambda: not of_clients(), 60), of_clients()
        slow.shutdown()


def test_a_bar_says_since_when_it_lies_on_its_cores(journal: str) -> None:
    # Given an action that got its second core 20 s ago, and runs for a minute
    engine, lanes = open_engine(journal), Lanes(time.time())
    with snapshot(engine) as connection:
        lanes.read(connection, read_present(connection, time.time()))
    engine.dispose()
    (bar,) = lanes.since(0)["bars"]
    start, sure = bar[3], bar[9]
    assert sure - start == pytest.approx(40_000, abs=2)


@pytest.mark.parametrize(("state", "shown"), [("up", "draining"), ("lost", "lost, draining")])
def test_a_draining_node_is_named_with_what_is_left_on_it(journal: str, state: Any, shown: str) -> None:
    write(
        journal, NodeChanged(name="n1", state=state, description=DESCRIBED, at=time.time() - 9999), NoteDraining(name="n1", draining=True)
    )
    document = seen(journal, SHOWN)
    # When the first page is shown in a terminal
    console = Console(width=80)
    with console.capture() as capture:
        console.print(top_page(document))
    # Then it says so, and what needs attention says what is left, as long as the node is up
    lines = capture.get().splitlines()
    assert any(line.startswith(f"n1    {shown} ") for line in lines), lines
    texts = [notice.text for notice in notices(document)]
    expected = "Node n1 is draining: 1 action, 0 environments left. Nothing new begins there until that is undone."
    assert (expected in texts) == (state == "up")
