"""Each word of a trainer once through a whole stack: what it does in full is tested where it is done."""

from __future__ import annotations

import asyncio
import json
import time
from array import array

import pytest

from app.replay.outside_api import OutsideApi
from app.scheduler_document import read_shown
from bench.quotas import outside as counting_server
from tangram import Action, ActionCancelled, ActionFailed, ActionTimedOut, AsyncClient, Client, calls
from tangram.calls import Place
from tangram.connection import find_addresses, open_store
from tests.live.support import Live
from tests.ports import free_port

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("gpu_node", "api_node")]

SEQUENCES = [[1, 2, 3], [4, 5], [6]]
SERVER = """
import http.server, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("X-Cores", str(len(os.sched_getaffinity(0))))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
open("ready", "w").close()
server.serve_forever()
"""


def test_commands_of_a_session_share_state_and_say_how_they_ended(client: Client) -> None:
    with client.open(trajectory="t") as env:
        assert env.exec("cd /; export WORD=kept; echo $WORD > $HOME/file").exit_code == 0
        began = time.monotonic()
        done = env.exec("pwd; echo $WORD; cat $HOME/file; echo wrong >&2; exit 3")
        whole_s = time.monotonic() - began
        assert (done.stdout, done.stderr, done.exit_code, done.status) == ("/\nkept\nkept\n", "wrong\n", 3, "succeeded")
        parts = (done.act.queue_s, done.act.background_s, done.act.overhead_s, done.act.execution_s)
        assert all(part >= 0 for part in parts) and 0 < done.act.execution_s <= sum(parts) <= whole_s
        # A fence leaves only the folder
        assert env.exec("echo $PWD ${WORD-none}", fence=True).stdout == "/ none\n"
        # Only containers have snapshots
        with pytest.raises(ActionFailed, match="only containers have snapshots"):
            env.snapshot()
    with pytest.raises(ActionFailed, match=r"was closed|being closed"):
        env.exec("echo")


def test_the_journal_keeps_what_a_failed_command_printed_last_without_secrets(client: Client, live: Live) -> None:
    with client.open(trajectory="secrets") as env:
        by_env = ["env", "OTHER=abcdef012345", "sh", "-c"]
        handle = env.submit("echo $TOKEN $OTHER >&2; exit 3", env={"TOKEN": "543210fedcba"}, interpreter=by_env)
        assert handle.result(60).exit_code == 3
    query = f"select excerpt from actions where id = '{handle.id}' and ended_at is not null"
    live.until(lambda: live.rows(query))
    kept = str(live.rows(query))
    assert "[variable] [variable]" in kept and "abcdef" not in kept and "fedcba" not in kept


def test_what_runs_waits_or_opens_can_be_cancelled_by_itself_or_with_its_trajectory(client: Client, live: Live) -> None:
    # Given an environment with a command that runs and one that waits, an idle one, and one that takes long to open
    busy, idle = client.open(trajectory="given-up"), client.open(trajectory="given-up")
    running, waiting = (busy.submit(command) for command in ("sleep 300", "echo never"))
    files = json.dumps({f"files/{number}": "" for number in range(200_000)})
    opens = client.submit(
        Action(kind="cpu.open", trajectory="given-up", environment="env-long", arguments={"environment": "env-long", "files": files})
    )
    live.until(lambda: live.rows(f"select 1 from actions where id = '{running.id}' and status = 'running'"))
    live.until(lambda: list(live.stack.state_dir.glob("environments/*/environments/env-long")))
    # When the one that waits is cancelled, and then the trajectory; then each ends as that
    waiting.cancel()
    with pytest.raises(ActionCancelled, match="cancelled by the trainer"):
        waiting.result(60)
    client.cancel(trajectory="given-up")
    for handle in (running, opens):
        with pytest.raises(ActionCancelled):
            handle.result(60)
    with pytest.raises(ActionFailed, match=r"was closed|being closed"):
        idle.exec("echo")
    # And nothing of them stands any more
    live.until(lambda: not live.rows("select 1 from environments where trajectory = 'given-up' and ended_at is null"))
    live.until(lambda: not list(live.stack.state_dir.glob("environments/*/environments/env-long")))


def test_a_server_in_an_environment_is_asked_on_a_core_of_the_request(client: Client, live: Live) -> None:
    body = bytes(range(256)) * 4096
    with client.open(trajectory="ports") as env:
        port, nobody = free_port(), free_port()
        env.write_file("server.py", SERVER)
        env.exec(f"python3 server.py {port} >log 2>&1 & until [ -e ready ]; do sleep 0.02; done", session="server", timeout_s=60)
        answer = env.request(port, "/path?key=secret", "POST", body=body, timeout_s=60)
        assert (answer.status, answer.body, answer.dop, answer.header("X-Cores")) == (200, body, 1, "1")
        with pytest.raises(ActionFailed, match=f"port {nobody}") as caught:
            client.submit(calls.request(Place("tests", "ports", env.id), nobody)).result(60)
        assert (caught.value.cause, caught.value.fault) == ("no_answer", "program")
    # Then the journal says so, without the query
    query = f"select action_class, status, cause from actions where kind = 'cpu.request' and environment = '{env.id}' order by position"
    live.until(
        lambda: [tuple(row) for row in live.rows(query)] == [(f"POST :{port}", "succeeded", ""), (f"GET :{nobody}", "failed", "no_answer")]
    )


def test_services_answer(client: Client) -> None:
    items = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "c"}]
    scores = client.score("judge", items)
    assert len(scores) == 2 and list(client.score("judge", items)) == list(scores)
    assert scores.act.execution_s >= 0 and scores.dop == 1
    assert client.generate("teacher", ["hello"], max_tokens=3)[0]
    # A batch is the same however its ids are given, also as it was before there were arrays
    expected = client.logprobs("teacher", SEQUENCES)
    assert [len(row) for row in expected] == [2, 1, 0]
    assert client.logprobs("teacher", [array("q", ids) for ids in SEQUENCES]) == expected
    plain = Action(kind="gpu.logprobs", service="teacher", arguments={"service": "teacher", "token_ids": SEQUENCES})
    assert client.submit(plain).result() == expected
    assert client.score("judge", []) == client.logprobs("teacher", []) == client.generate("teacher", []) == []


def test_an_outside_api_is_called_within_its_quota(client: Client, live: Live, outside: OutsideApi) -> None:
    answer = client.call("search", url=f"{outside.base_url}/search?q=owls")
    assert (answer.status_code, answer.json()["query"]) == (200, "owls")
    with pytest.raises(ActionTimedOut, match=r"no answer within 0.3 s"):
        client.call("search", url=f"{outside.base_url}/work?seconds=20", timeout_s=0.3)
    # A quota that names no hosts reaches no private address; the journal has the reason without the query
    handle = client.submit(calls.call("tests", "public", url=f"{outside.base_url}/search?key=geheim"))
    with pytest.raises(ActionFailed, match=r"GET http://127.0.0.1:\d+/search: 127.0.0.1 is no public address") as caught:
        handle.result(60)
    live.until(lambda: live.rows(f"select reason from actions where id = '{handle.id}'") == [(caught.value.reason,)])


def test_what_an_answer_cost_is_waited_for(client: Client, live: Live) -> None:
    # Given 10 tokens a second, and an answer that says that it cost 20 though none were declared
    with counting_server() as server:
        began = time.monotonic()
        client.call("llm", url=f"{server}/limited?account=any&tokens=20")
        live.until(lambda: live.rows("select 1 from actions where quota = 'llm' and ended_at is not null"))
        # When the next one comes; then it waits for them, from the end of the first one on
        client.call("llm", url=f"{server}/limited?account=any", tokens=1)
        assert time.monotonic() - began > 1.5


async def test_coroutines_share_one_client_and_cancel_their_actions(live: Live) -> None:
    async with AsyncClient("async-tests", live.settings) as client:

        async def rollout(number: int) -> str:
            async with await client.open(trajectory=f"a{number}") as env:
                await env.write_file("n", str(number))
                handle = await env.submit("cat n", units=[1, 2])
                return (await handle).stdout

        assert await asyncio.gather(*(rollout(n) for n in range(8))) == [str(n) for n in range(8)]
        rows = await client.logprobs("teacher", SEQUENCES, top_k=2)
        assert [len(row) for row in rows.top_ids] == [2, 1, 0]
        async with await client.open(trajectory="a") as env:
            task = asyncio.ensure_future(env.exec("touch running; sleep 300; touch late"))
            while not (await env.exec("ls", session="look")).stdout:
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The session is free again long before the command would have ended.
            assert (await asyncio.wait_for(env.exec("ls"), 100)).stdout == "running\n"


def test_memory_is_granted_to_an_environment_as_it_uses_it(client: Client, live: Live) -> None:
    if "the memory of environments is booked by their limits" in live.log("cpu-0"):
        pytest.skip("needs control groups that the worker may write")
    store = open_store(find_addresses(live.settings).result_url, 60.0, 1)

    def granted_mb() -> int:
        shown = read_shown(store) or {"nodes": {}}
        memory = shown["nodes"].get("cpu-0", {}).get("memory") or {}  # none before its worker has beaten
        return int(memory.get("granted_mb", 0))

    with client.open(trajectory="grows", memory_mb=1024) as env:
        done = env.exec("python3 -S -c 'print(len(bytearray(200 << 20)))'")
        assert (done.stdout, done.exit_code) == (f"{200 << 20}\n", 0)
        live.until(lambda: 0 < granted_mb() < 1024)
    store.close()


def test_workers_keep_no_thread_per_action_and_a_usual_run_logs_nothing_that_frightens(client: Client, live: Live) -> None:
    names = ("scheduler", *live.plan.node_names())
    logged = {name: len(live.log(name)) for name in names}
    worker = live.process("cpu-0")
    with client.open(trajectory="t") as env:
        for _ in range(3):
            env.exec("exit 1")
        before = worker.num_threads(), worker.num_fds()
        for _ in range(40):
            env.exec("echo")
        # The pool makes threads up to its bound while it gets work; anything else would show as many more than calls.
        assert worker.num_threads() <= before[0] + 40
        assert worker.num_fds() <= before[1] + 5
        env.exec("sleep 9", timeout_s=0.1)
        with pytest.raises(ActionFailed, match="missing does not exist"):
            env.read_file("missing")
    for name in names:
        said = live.log(name)[logged[name] :]
        assert "Traceback" not in said and "ERROR" not in said, said
