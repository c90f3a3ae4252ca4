"""A trainer's words against a whole stack."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.replay.outside_api import OutsideApi
from tangram import Action, ActionCancelled, ActionError, ActionFailed, ActionTimedOut, AsyncClient, Client, calls
from tests.live.support import Live

pytestmark = pytest.mark.usefixtures("gpu_node", "api_node")


def test_state_is_kept_between_commands(client: Client) -> None:
    with client.open(trajectory="t") as env:
        assert env.exec("cd /; export WORD=kept; echo $WORD > $HOME/file").exit_code == 0
        done = env.exec("pwd; echo $WORD; cat $HOME/file")
        assert (done.stdout, done.stderr, done.exit_code, done.status) == ("/\nkept\nkept\n", "", 0, "succeeded")
        env.write_file("a/b.txt", b"\x00\xff")
        assert env.read_file("a/b.txt") == b"\x00\xff"
        assert env.exec("exit 3").exit_code == 3


def test_the_parts_of_the_act_add_up(client: Client) -> None:
    with client.open(trajectory="t") as env:
        began = time.monotonic()
        done = env.exec("sleep 0.1")
        whole_s = time.monotonic() - began
    parts = (done.act.queue_s, done.act.overhead_s, done.act.execution_s)
    assert all(part >= 0 for part in parts)
    assert 0.1 <= done.act.execution_s <= sum(parts) <= whole_s


def test_a_fence_ends_what_earlier_commands_left_running(client: Client) -> None:
    with client.open(trajectory="t") as env:
        # Given a process that a command of another session left, and a variable, a function and a folder of the asking one
        left = env.exec("sleep 300 >/dev/null 2>&1 & echo $!", session="other").stdout.strip()
        env.exec("mkdir -p deep && cd deep && export WORD=left; basename() { echo left; }")
        # When a scoring command asks for a fence
        done = env.exec(f"basename $PWD; echo ${{WORD-none}}; kill -0 {left} 2>/dev/null && echo alive || echo gone", fence=True)
        # Then that process is gone, and of the session only the folder is left
        assert done.stdout.split() == ["deep", "none", "gone"]


def test_an_environment_that_is_no_container_has_no_snapshot(client: Client) -> None:
    with client.open(trajectory="t") as env, pytest.raises(ActionFailed, match="only containers have snapshots"):
        env.snapshot()


def test_sessions_run_side_by_side(client: Client) -> None:
    with client.open(trajectory="t") as env:
        # Given two commands that each wait for the other, which one after the other would never end
        first = env.submit("touch one; until [ -e two ]; do sleep 0.01; done", session="a", timeout_s=60)
        second = env.submit("touch two; until [ -e one ]; do sleep 0.01; done", session="b", timeout_s=60)
        assert first.result(100).exit_code == second.result(100).exit_code == 0


def test_commands_of_one_session_run_one_after_the_other(client: Client) -> None:
    with client.open(trajectory="t") as env:
        handles = [env.submit(f"echo {n} >> order; sleep 0.02") for n in range(5)]
        assert all(handle.result(60).exit_code == 0 for handle in handles)
        assert env.read_file("order").split() == [b"0", b"1", b"2", b"3", b"4"]


def test_a_session_is_closed_once_its_commands_have_ended(client: Client) -> None:
    with client.open(trajectory="t") as env:
        env.exec("export WORD=kept", session="other")
        running = env.submit("echo $WORD; sleep 0.2", session="other")
        env.close_session("other")
        assert running.result(60).stdout == "kept\n"
        assert env.exec("echo -$WORD-", session="other").stdout == "--\n"


def test_a_timeout_returns_what_was_printed_and_kills_the_group(client: Client) -> None:
    with client.open(trajectory="t") as env:
        done = env.exec("echo before; (sleep 300 & echo $! > pid; wait); echo after", timeout_s=6)
        assert (done.status, done.exit_code, done.stdout) == ("timed_out", None, "before\n")
        assert "6 s" in done.reason
        # And its processes are gone
        pid = int(env.read_file("pid"))
        assert env.exec(f"kill -0 {pid}").exit_code == 1


def test_a_command_that_prints_nothing_times_out(client: Client) -> None:
    with client.open(trajectory="t") as env:
        done = env.exec("echo once; sleep 300", output_timeout_s=6, timeout_s=60)
        assert (done.status, done.stdout) == ("timed_out", "once\n")


def test_queueing_does_not_eat_the_timeout(client: Client) -> None:
    with client.open(trajectory="t") as env:
        first = env.submit("sleep 5.2")
        second = env.submit("echo done", timeout_s=5)
        assert first.result(60).exit_code == 0
        assert second.result(60).stdout == "done\n"


def test_a_running_and_a_waiting_action_can_be_cancelled(client: Client, live: Live) -> None:
    with client.open(trajectory="t") as env:
        running = env.submit("touch running; sleep 300")
        waiting = env.submit("echo never")
        live.until(lambda: env.submit("ls", session="look").result(60).stdout == "running\n")
        waiting.cancel()
        with pytest.raises(ActionCancelled, match="cancelled by the trainer"):
            waiting.result(60)
        running.cancel()
        with pytest.raises(ActionCancelled, match="cancelled by the trainer"):
            running.result(60)
        assert env.exec("echo fine").stdout == "fine\n"


def test_cancelling_a_trajectory_ends_its_actions_and_environments(client: Client, live: Live) -> None:
    # Given two environments of a trajectory, one busy, and one of another
    busy, idle = client.open(trajectory="given-up"), client.open(trajectory="given-up")
    with client.open(trajectory="kept") as kept:
        running = busy.submit("touch running; sleep 60")
        live.until(lambda: busy.submit("ls", session="look").result(60).stdout == "running\n")
        # When
        client.cancel(trajectory="given-up")
        # Then
        with pytest.raises(ActionCancelled):
            running.result(60)
        for env in (busy, idle):
            with pytest.raises(ActionFailed, match=r"was closed|being closed"):
                env.exec("echo")
        assert kept.exec("echo still").stdout == "still\n"
    ids = f"('{busy.id}', '{idle.id}')"
    live.until(lambda: live.rows(f"select count(*) from environments where id in {ids} and state = 'closed'")[0][0] == 2)


def test_large_values_travel_beside_the_messages(client: Client, live: Live) -> None:
    data = os.urandom(5_000_000)
    with client.open(trajectory="t") as env:
        env.write_file("big", data)
        assert env.read_file("big") == data
        done = env.exec("head -c 1000000 /dev/zero | tr '\\0' x")
        assert done.stdout == "x" * 1_000_000
        assert not done.truncated


def test_output_beyond_the_limit_is_cut_and_says_so(client: Client, live: Live) -> None:
    with client.open(trajectory="t") as env:
        done = env.exec("head -c 5000000 /dev/zero | tr '\\0' x; echo end")
        assert done.truncated
        assert len(done.stdout) <= live.settings.output_limit_bytes
        assert done.exit_code == 0


def test_the_program_is_told_its_dop_and_held_to_it(client: Client) -> None:
    available = len(os.sched_getaffinity(0))
    if available < 2:
        pytest.skip("needs two cores")
    with client.open(trajectory="t") as env:
        for units in (1, 2):
            done = env.exec("echo $TANGRAM_DOP $OMP_NUM_THREADS $(nproc --all >/dev/null; nproc)", units=[units])
            assert (done.dop, done.stdout) == (units, f"{units} {units} {units}\n")


def test_a_program_is_told_what_it_may_grow_to(client: Client, live: Live) -> None:
    # Given a node of some cores, and a command that could use more than these
    cores = live.plan.cores
    assert cores > 1

    # When it runs
    with client.open(trajectory="t") as env:
        done = env.exec("echo $TANGRAM_DOP_MAX", units=[1, cores, cores + 1])
        fixed = env.exec("echo $TANGRAM_DOP_MAX", units=[1])

    # Then it is told the largest of its amounts that the node has
    assert (done.stdout, fixed.stdout) == (f"{cores}\n", "1\n")


def test_an_environment_that_is_closed_is_gone(client: Client) -> None:
    env = client.open(trajectory="t")
    env.close()
    with pytest.raises(ActionFailed, match=r"was closed|being closed"):
        env.exec("echo")


def test_services_answer(client: Client) -> None:
    items = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "c"}]
    scores = client.score("judge", items)
    assert len(scores) == 2
    assert list(client.score("judge", items)) == list(scores)
    assert [len(row) for row in client.logprobs("teacher", [[1, 2, 3], [4, 5]])] == [2, 1]
    assert client.generate("teacher", ["hello"], max_tokens=3)[0]
    assert scores.act.execution_s >= 0
    assert scores.dop == 1


def test_a_service_that_nobody_declared_is_refused(client: Client) -> None:
    with pytest.raises(Exception, match="'nobody' is not declared"):
        client.score("nobody", [{"prompt": "a", "response": "b"}])


def test_an_outside_api_answers(client: Client, outside: OutsideApi) -> None:
    answer = client.call("search", url=f"{outside.base_url}/search?q=owls")
    assert (answer.status_code, answer.json()["query"]) == (200, "owls")
    assert client.call("search", url=f"{outside.base_url}/nothing").status_code == 404


def test_a_quota_that_names_no_hosts_reaches_no_private_address_and_the_call_fails_at_once(client: Client, outside: OutsideApi) -> None:
    handle = client.submit(calls.call("tests", "public", url=f"{outside.base_url}/search?q=owls"))
    with pytest.raises(ActionFailed, match=r"GET http://127.0.0.1:\d+/search.*: 127.0.0.1 is no public address, and the quota does not"):
        handle.result(60)


def test_an_api_that_refuses_connections_fails_with_one_line(client: Client) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(ActionFailed, match=rf"GET http://127.0.0.1:{port}/x: .*Connection refused") as caught:
            client.call("search", url=f"http://127.0.0.1:{port}/x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fails", ["refused", "late", "not named", "unreadable", "header"])
def test_how_a_call_ended_says_no_secret_of_its_request(live: Live, client: Client, outside: OutsideApi, fails: str) -> None:
    # Given a call with secrets wherever a request has room for them, which fails
    host = outside.base_url.removeprefix("http://") if fails != "refused" else "127.0.0.1:1"
    url = f"http://ann:geheim@{host}/work?seconds=20&key=geheim#geheim"
    headers = {"X-Key": "geheim\n"} if fails == "header" else {}
    if fails == "unreadable":
        url = "http://ann:geheim"
    action = calls.call(
        "tests", "public" if fails == "not named" else "search", url=url, headers=headers, timeout_s=0.3 if fails == "late" else 20.0
    )
    handle = client.submit(action)
    with pytest.raises(ActionError) as caught:
        handle.result(60)
    # Then the caller and the journal have the rest of the address, and no secret
    live.until(lambda: live.rows(f"SELECT 1 FROM actions WHERE id = '{handle.id}' AND ended_at IS NOT NULL"))
    ((reason,),) = live.rows(f"SELECT reason FROM actions WHERE id = '{handle.id}'")
    assert reason == caught.value.reason and "geheim" not in f"{caught.value!r} {reason}"
    assert ("a URL that cannot be read: Invalid port" if fails == "unreadable" else f"GET http://{host}/work: ") in reason


def test_an_api_that_is_too_slow_times_out(client: Client, outside: OutsideApi) -> None:
    with pytest.raises(ActionTimedOut, match=r"no answer within 0.3 s"):
        client.call("search", url=f"{outside.base_url}/work?seconds=20", timeout_s=0.3)


@pytest.fixture
def dripping() -> Any:
    """Return the URL of a server that sends a byte now and then, for ever."""
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def drip(peer: socket.socket) -> None:
        with peer:
            peer.recv(4096)
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
            while not stop.wait(0.05):
                try:
                    peer.sendall(b"x")
                except OSError:
                    return

    def serve() -> None:
        while True:
            try:
                peer, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(peer,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}/"
    stop.set()
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_an_api_that_drips_is_cut_off_at_the_timeout(client: Client, dripping: str) -> None:
    began = time.monotonic()
    with pytest.raises(ActionTimedOut, match=r"no answer within 0.6 s"):
        client.call("search", url=dripping, timeout_s=0.6)
    assert time.monotonic() - began < 60


def test_a_call_can_be_cancelled(client: Client, outside: OutsideApi) -> None:
    handle = client.submit(
        Action.from_header({"kind": "api.call", "cost": {"quota:search": [1]}}).with_arguments(
            quota="search", method="GET", url=f"{outside.base_url}/work?seconds=30"
        )
    )
    handle.cancel()
    with pytest.raises(ActionCancelled):
        handle.result(60)


async def test_coroutines_share_one_client(live: Live) -> None:
    async with AsyncClient("async-tests", live.settings) as client:

        async def rollout(number: int) -> str:
            async with await client.open(trajectory=f"a{number}") as env:
                await env.write_file("n", str(number))
                assert await env.read_file("n") == str(number).encode()
                handle = await env.submit("cat n", units=[1, 2])
                return (await handle).stdout

        assert await asyncio.gather(*(rollout(n) for n in range(8))) == [str(n) for n in range(8)]


async def test_cancelling_a_coroutine_cancels_its_action(live: Live) -> None:
    async with AsyncClient("async-tests", live.settings) as client, await client.open(trajectory="a") as env:
        task = asyncio.ensure_future(env.exec("touch running; sleep 300; touch late"))
        while not (await env.exec("ls", session="look")).stdout:
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The session is free again long before the command would have ended.
        assert (await asyncio.wait_for(env.exec("ls"), 100)).stdout == "running\n"


def test_leaving_the_client_closes_its_environments(live: Live) -> None:
    with live.client("leaver") as client:
        env = client.open(trajectory="t")
    live.until(lambda: live.rows(f"select state from environments where id = '{env.id}'")[0][0] == "closed")


def test_workers_keep_no_thread_per_action(client: Client, live: Live) -> None:
    worker = live.process("cpu-0")
    with client.open(trajectory="t") as env:
        for _ in range(3):
            env.exec("echo")
        before = worker.num_threads(), worker.num_fds()
        for _ in range(40):
            env.exec("echo")
        # The pool makes threads up to its bound while it gets work; anything else would show as many more than calls.
        assert worker.num_threads() <= before[0] + 40
        assert worker.num_fds() <= before[1] + 5


def test_a_worker_whose_commands_see_the_host_says_so(own_stack: Callable[..., Live], tmp_path: Path) -> None:
    # Given a host on which bubblewrap does not work
    bubblewrap = tmp_path / "bin" / "bwrap"
    bubblewrap.parent.mkdir()
    bubblewrap.write_text("#!/bin/sh\nexit 1\n")
    bubblewrap.chmod(0o755)
    # When a worker of its own accord does without
    live = own_stack(variables={"PATH": f"{bubblewrap.parent}:{os.environ['PATH']}"})
    # Then its node says so, and its log warns
    (name,) = live.plan.node_names()[:1]
    ((description,),) = live.rows(f"SELECT description FROM nodes WHERE name = '{name}'")
    assert "isolation:none" in json.loads(description)["labels"]
    assert re.search(r"WARNING.*commands are set apart by: none", live.log(name))
