"""Requests to servers that commands left running in an environment, against a whole stack."""

from __future__ import annotations

import asyncio
import json

import pytest

from tangram import ActionCancelled, ActionFailed, ActionTimedOut, AsyncClient, Client, Environment, HttpAnswer, calls
from tangram.calls import Place
from tests.live.support import Live
from tests.ports import free_port

SERVER = """
import http.server, json, os, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/never":
            time.sleep(600)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        said = {"path": self.path, "word": self.headers.get("X-Word"), "cores": sorted(os.sched_getaffinity(0)), "bytes": len(body)}
        answer = body if self.path == "/back" else json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
open("ready", "w").close()
server.serve_forever()
"""
BEGIN = "rm -f ready; python3 server.py {port} >log 2>&1 & until [ -e ready ]; do sleep 0.02; done"


def serve(env: Environment) -> int:
    """Leave a server running in an environment, and return its port."""
    port = free_port()
    env.write_file("server.py", SERVER)
    done = env.exec(BEGIN.format(port=port), session="server", timeout_s=60)
    assert done.exit_code == 0, done
    return port


def test_a_server_answers_on_the_core_that_the_request_was_granted(client: Client) -> None:
    # Given a server that a command left running, while no command runs
    with client.open(trajectory="t") as env:
        port = serve(env)
        # When it is asked
        answer = env.request(port, "/some?x=1", headers={"X-Word": "hello"}, timeout_s=60)
        # Then it has answered, on one core
        assert (answer.status, answer.dop) == (200, 1)
        said = answer.json()
        assert (said["path"], said["word"], len(said["cores"])) == ("/some?x=1", "hello", 1)
        assert answer.header("Content-Length") == str(len(answer.text))
        assert 0 <= answer.act.execution_s <= answer.act.total_s


def test_large_bodies_come_whole_in_both_directions(client: Client) -> None:
    data = bytes(range(256)) * 4096
    with client.open(trajectory="t") as env:
        assert env.request(serve(env), "/back", "POST", body=data).body == data


def test_how_a_request_ends_is_in_the_journal(live: Live, client: Client) -> None:
    with client.open(trajectory="ports") as env:
        port, nobody = serve(env), free_port()
        place = Place("tests", "ports", env.id)
        good = client.submit(calls.request(place, port, "/path?key=secret"))
        assert good.result(60).status == 200
        # When nothing listens; when the answer does not come in time; when the request is cancelled
        with pytest.raises(ActionFailed, match=f"port {nobody}") as caught:
            env.request(nobody)
        assert (caught.value.cause, caught.value.fault) == ("no_answer", "program")
        with pytest.raises(ActionTimedOut):
            env.request(port, "/never", timeout_s=0.3)
        late = client.submit(calls.request(place, port, "/never"))
        live.until(lambda: live.rows(f"SELECT id FROM actions WHERE id = '{late.id}' AND status = 'running'"))
        late.cancel()
        with pytest.raises(ActionCancelled):
            late.result(60)
    # Then the journal says so, and that each had a core
    query = (
        "SELECT a.action_class, a.status, a.cause, a.fault, g.resource, g.units FROM actions a JOIN grants g ON g.action = a.id "
        f"WHERE a.kind = 'cpu.request' AND a.environment = '{env.id}' AND a.ended_at IS NOT NULL ORDER BY a.position"
    )
    live.until(lambda: len(live.rows(query)) == 4)
    assert [tuple(row) for row in live.rows(query)] == [
        (f"GET :{port}", "succeeded", "", "", "cores", 1),
        (f"GET :{nobody}", "failed", "no_answer", "program", "cores", 1),
        (f"GET :{port}", "timed_out", "timeout", "program", "cores", 1),
        (f"GET :{port}", "cancelled", "cancelled", "caller", "cores", 1),
    ]


def test_many_coroutines_ask_one_server(live: Live) -> None:
    async def ask_all() -> list[HttpAnswer]:
        async with AsyncClient(job="tests", settings=live.settings) as client:
            env = await client.open(trajectory="t")
            port = free_port()
            await env.write_file("server.py", SERVER)
            assert (await env.exec(BEGIN.format(port=port), timeout_s=60)).exit_code == 0
            return await asyncio.gather(*(env.request(port, f"/{number}", timeout_s=60) for number in range(40)))

    assert [json.loads(answer.text)["path"] for answer in asyncio.run(ask_all())] == [f"/{number}" for number in range(40)]
