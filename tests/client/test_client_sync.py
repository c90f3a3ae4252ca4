"""The sync client against a peer that speaks the real protocol."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from app.local.processes import wait_until
from tangram import (
    Action,
    ActionFailed,
    ActionLost,
    ActionTimedOut,
    AsyncClient,
    Client,
    ClientClosed,
    Cost,
    Environment,
    ExecResult,
    InvalidAction,
    ResultNotReady,
    Settings,
)
from tangram.arrays import pack_floats, pack_ints
from tangram.blobs import Blobs
from tangram.life_signs import silences
from tangram.wire import BLOB_THRESHOLD_BYTES, CLIENT_KEY_PREFIX


@pytest.fixture
def client(peer: Any, settings: Settings) -> Iterator[Client]:
    """Return a client of the peer."""
    with Client(settings=settings) as client:
        yield client


@pytest.fixture
def env(client: Client) -> Environment:
    """Return an environment of it."""
    return client.open(trajectory="t")


def closed(peer: Any) -> list[str]:
    """Return the environments whose close has arrived, in order."""
    return [seen.arguments["environment"] for seen in peer.seen if seen.kind == "cpu.close"]


def test_a_command_gives_its_output_and_the_whole_time_it_took(peer: Any, env: Environment) -> None:
    # Given a stack that reports half a second of queueing that was never waited for, and none of execution
    act = {"queue_s": 0.0, "overhead_s": 0.0, "execution_s": 0.0}
    value = {"exit_code": 3, "stdout": "out", "stderr": "err", "truncated": True, "cpu_s": 1.5, "max_rss_mb": 7.0}
    peer.behave = lambda seen: peer.payload(value, dop=4, act=act) if seen.kind == "cpu.exec" else peer.payload()
    before = time.monotonic()
    done = env.exec("make", units=[1, 4], timeout_s=60, parallel_fraction=0.5)
    waited_s = time.monotonic() - before
    assert (done.status, done.exit_code, done.stdout, done.stderr, done.truncated) == ("succeeded", 3, "out", "err", True)
    assert (done.dop, done.cpu_s, done.max_rss_mb) == (4, 1.5, 7.0)
    assert 0 < done.act.overhead_s == done.act.total_s <= waited_s
    # And one that is killed at its timeout is a result, too
    value = {"exit_code": None, "stdout": "so far", "stderr": "", "truncated": False}
    peer.behave = lambda seen: peer.payload(value, status="timed_out", reason="timeout of 1 s")
    killed = env.exec("sleep 9", timeout_s=1)
    assert isinstance(killed, ExecResult)
    assert (killed.status, killed.exit_code, killed.stdout, killed.reason) == ("timed_out", None, "so far", "timeout of 1 s")


def test_a_request_to_a_server_is_one_action_and_gives_its_answer(peer: Any, settings: Settings) -> None:
    # Given a stack that answers requests with their own bodies, large ones beside the message
    def behave(seen: Any) -> Any:
        if seen.kind != "cpu.request":
            return peer.payload()
        return peer.payload({"status": 404, "headers": [["set-cookie", "a"], ["set-cookie", "b"]], "body": seen.arguments.get("body", "")})

    peer.behave = behave
    large = bytes(range(256)) * BLOB_THRESHOLD_BYTES
    with Client(job="coding", settings=settings) as client, client.open(trajectory="t1") as env:
        answer = env.request(8000, "/path?token=hidden", "POST", headers={"X-Y": "z"}, body=large, timeout_s=9, priority=7)
    # Then what was asked has arrived, and what was answered is here
    asked = peer.seen[1]
    words = {name: asked.arguments[name] for name in ("environment", "port", "path", "method", "headers")}
    assert words == {"environment": env.id, "port": 8000, "path": "/path?token=hidden", "method": "POST", "headers": [["X-Y", "z"]]}
    action = Action.from_header(asked.header)
    assert (action.cost, action.timeout_s, action.priority, action.action_class) == (Cost.of(cores=1), 9, 7, "POST :8000")
    assert (answer.status, answer.headers, answer.body) == (404, (("set-cookie", "a"), ("set-cookie", "b")), large)
    assert (answer.header("Set-Cookie"), answer.header("absent", "none")) == ("a", "none")
    # And tools of Celery show it in words, without what may be secret
    assert "'request': 'POST :8000/path'" in asked.celery["kwargsrepr"] and "hidden" not in asked.celery["kwargsrepr"]


def test_what_was_asked_arrives_as_a_celery_task_with_its_header(peer: Any, settings: Settings) -> None:
    with Client(job="coding", settings=settings) as client:
        env = client.open(trajectory="t1", image="python:3.12", memory_mb=512, requires=["x86"])
        env.exec("pytest -q", units=[1, 2], timeout_s=9, session="s2", priority=8, env={"A": "1"}, action_class="pytest")
    opened, ran, closed = peer.seen
    assert opened.arguments == {"environment": env.id, "image": "python:3.12", "memory_mb": 512}
    assert (opened.header["cost"], opened.header["requires"]) == ({"memory_mb": [512]}, ["x86"])
    assert ran.arguments == {"environment": env.id, "session": "s2", "command": "pytest -q", "variables": {"A": "1"}}
    action = Action.from_header(ran.header)
    assert action.cost == Cost.of(cores=[1, 2])
    assert (action.job, action.trajectory, action.environment, action.session) == ("coding", "t1", env.id, "s2")
    assert (action.timeout_s, action.priority, action.action_class, action.idempotent) == (9, 8, "pytest", False)
    assert abs(ran.header["submitted_at"] - time.time()) < 60
    assert (closed.kind, closed.arguments) == ("cpu.close", {"environment": env.id})
    assert ran.celery["ignore_result"] is False


def test_files_and_output_go_both_ways_small_and_large(peer: Any, env: Environment, redis_urls: Any) -> None:
    # Given a peer that keeps what is written, in its wire form, and gives it back
    files: dict[str, Any] = {}
    text = "é" * BLOB_THRESHOLD_BYTES
    with redis_urls.client() as store:
        reference = Blobs(store).put_text(text)

    def keep(seen: Any) -> Any:
        if seen.kind == "cpu.write_file":
            files[seen.arguments["path"]] = seen.arguments["data"]
        if seen.kind == "cpu.exec":
            return peer.printed(reference)
        return peer.payload({"data": files[seen.arguments["path"]]} if seen.kind == "cpu.read_file" else None)

    peer.behave = keep
    large = os.urandom(1024 * 1024)
    env.write_file("small", b"\x00\xff")
    env.write_file("text", "grüß")
    env.write_file("large", large, mode=0o755)
    assert env.read_file("small") == b"\x00\xff"
    assert env.read_file("text").decode() == "grüß"
    assert env.read_file("large") == large
    assert isinstance(files["small"], str) and files["large"]["bytes"] == len(large)
    assert env.exec("cat big").stdout == text


def test_services_give_scores_logprobs_and_texts(peer: Any, settings: Settings) -> None:
    values = {
        "gpu.score": pack_floats([[0.5, -1.0]], "float64"),
        "gpu.logprobs": pack_floats([[-0.5, -1.5], []]),
        "gpu.generate": ["a", "b"],
    }
    peer.behave = lambda seen: peer.payload(values[seen.kind], dop=2)
    with Client(settings=settings) as client:
        scores = client.score("rm", [{"prompt": "p", "response": "r"}] * 2, units=[1, 2])
        logprobs = client.logprobs("teacher", [[1, 2, 3], [4]])
        texts = client.generate("judge", ["x", "y"], max_tokens=5, temperature=0.0, seed=1)
    assert (list(scores), scores.dop, scores.act.total_s > 0) == ([0.5, -1.0], 2, True)
    assert (list(logprobs), logprobs.dop) == ([[-0.5, -1.5], []], 2)
    assert (list(texts), texts.dop) == (["a", "b"], 2)
    assert [seen.header.get("service") for seen in peer.seen] == ["rm", "teacher", "judge"]
    assert [seen.header.get("idempotent") for seen in peer.seen] == [True, True, True]
    assert [seen.header["cost"] for seen in peer.seen] == [{"cells": [1, 2]}, {}, {}]
    assert peer.seen[2].arguments == {"service": "judge", "prompts": ["x", "y"], "max_tokens": 5, "temperature": 0.0, "seed": 1}


def ranked() -> dict[str, Any]:
    """Return the log-probabilities of two positions with their ranks and two likeliest ids, and none of a second sequence."""
    return {
        "logprobs": pack_floats([[-0.5, -1.5], []]),
        "ranks": pack_ints([[1, 3], []]),
        "top_ids": pack_ints([[2, 8, 7, 9], []]),
        "top_logprobs": pack_floats([[-0.5, -2.0, -0.25, -1.0], []]),
    }


def test_ranks_and_most_likely_ids_come_with_log_probs(peer: Any, settings: Settings) -> None:
    value = ranked()
    peer.behave = lambda seen: peer.payload(value)
    with Client(settings=settings) as client:
        found = client.logprobs("teacher", [[1, 2, 3], [4]], top_k=2)
        value["top_ids"] = pack_ints([[2, 8, 7], []])
        with pytest.raises(ActionFailed, match=r"unreadable: offsets: 3 numbers are not as many for each of 2 positions"):
            client.logprobs("teacher", [[1, 2, 3], [4]], top_k=2)
        value["ranks"] = pack_ints([[1], []])
        with pytest.raises(ActionFailed, match="unreadable: offsets: ranks and most likely ids are not those of the log-probs"):
            client.logprobs("teacher", [[1, 2, 3], [4]], top_k=2)
    assert (list(found), found.ranks) == ([[-0.5, -1.5], []], [[1, 3], []])
    assert (found.top_ids, found.top_logprobs) == ([[[2, 8], [7, 9]], []], [[[-0.5, -2.0], [-0.25, -1.0]], []])
    assert peer.seen[0].arguments["top_k"] == 2


def test_log_probs_come_back_as_numpy_where_that_went_in(peer: Any, settings: Settings) -> None:
    value = ranked()
    peer.behave = lambda seen: peer.payload(value)
    with Client(settings=settings) as client:
        found = client.logprobs("teacher", [np.array([1, 2, 3]), np.array([4])], top_k=2)
        rows = client.logprobs("teacher", np.array([[1, 2, 3], [4, 5, 6]]), top_k=2)
    for logprobs in (found, rows):
        kinds = [(part[0].dtype, part[0].shape) for part in (logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs)]
        assert kinds == [(np.float32, (2,)), (np.int32, (2,)), (np.int32, (2, 2)), (np.float32, (2, 2))]
        assert (logprobs[0].tolist(), logprobs.top_ids[0].tolist(), logprobs[1].size) == ([-0.5, -1.5], [[2, 8], [7, 9]], 0)


def test_a_call_carries_its_quota_and_keeps_keys_out_of_flower(peer: Any, settings: Settings) -> None:
    answer = {"status_code": 429, "headers": {"retry-after": "1"}, "body": "eyJhIjogMX0=", "truncated": False}
    peer.behave = lambda seen: peer.payload(answer)
    with Client(settings=settings) as client:
        got = client.call("search", method="POST", url="https://api/x?key=SECRET", headers={"Authorization": "SECRET"}, json={"q": 1})
    assert (got.status_code, got.headers, got.json()) == (429, {"retry-after": "1"}, {"a": 1})
    (seen,) = peer.seen
    assert seen.header["cost"] == {"quota:search": [1]}
    assert "idempotent" not in seen.header
    assert seen.arguments["headers"] == {"Authorization": "SECRET", "Content-Type": "application/json"}
    assert "SECRET" not in seen.celery["kwargsrepr"] + seen.celery["argsrepr"]


def test_any_celery_task_can_be_an_action_and_keeps_the_job_that_it_names(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: {"sum": sum(seen.arguments["numbers"])}
    with Client(job="mine", settings=settings) as client:
        for job in ("", "default", "other"):
            handle = client.submit(Action(kind="my.task", job=job, arguments={"numbers": [1, 2]}, cost=Cost.of(cores=1)))
            assert handle.result(30) == {"sum": 3}
    assert [seen.header["job"] for seen in peer.seen] == ["mine", "default", "other"]


def test_arguments_that_are_no_json_fail_their_own_action_only(peer: Any, client: Client) -> None:
    bad = client.submit(Action(kind="my.task", arguments={"x": object()}))
    client.submit(Action(kind="my.task", arguments={"x": 1})).result(30)
    with pytest.raises(InvalidAction, match="arguments"):
        bad.result(30)


def test_running_out_of_patience_leaves_the_action_alone(peer: Any, client: Client) -> None:
    peer.behave = lambda seen: peer.HOLD
    handle, late = (client.submit(Action(kind="my.task")) for _ in range(2))
    peer.until(lambda: len(peer.seen) == 2)
    with pytest.raises(ResultNotReady, match=handle.id):
        handle.result(timeout_s=0.05)
    assert not handle.done()
    peer.store(handle.id, 42)
    assert handle.result(30) == 42 and handle.done()
    # An action that timed out is another thing
    peer.store(late.id, ActionTimedOut("ran 5 s"))
    with pytest.raises(ActionTimedOut, match="ran 5 s"):
        late.result(30)


def test_cancelling_a_trajectory_names_its_job_and_forgets_its_environments(peer: Any, settings: Settings) -> None:
    with Client(job="j", settings=settings) as client:
        client.open(trajectory="t1")
        kept = client.open(trajectory="t2")
        client.cancel(trajectory="t1")
        peer.behave = lambda seen: peer.HOLD
        waits = client.submit(Action(kind="my.task", job="other", cost=Cost.of(cores=1)))
        client.cancel(job="other")
        peer.until(lambda: len(peer.controls) == 2)
        peer.behave = peer.usual
        for words in ({}, {"trajectory": "t", "job": "j"}):
            with pytest.raises(InvalidAction, match="either a trajectory or a job"):
                client.cancel(**words)
    assert peer.controls == [{"cancel": {"trajectory": "t1", "job": "j"}}, {"cancel": {"job": "other", "ids": [waits.id]}}]
    assert closed(peer) == [kept.id]


def test_leaving_the_block_of_an_environment_that_cannot_be_closed_keeps_what_was_earned(
    peer: Any, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    peer.behave = lambda seen: ActionLost("node n1 is lost") if seen.kind == "cpu.close" else peer.usual(seen)
    with Client(settings=settings) as client:
        with client.open(trajectory="a") as env:
            reward = env.exec("1.0").stdout
        # Then it is said, and whoever closes it by hand is told by an exception
        assert reward == "1.0" and caplog.messages == [f"environment {env.id}, as its block was left: node n1 is lost"]
        with pytest.raises(ActionLost):
            client.open(trajectory="b").close()


@pytest.mark.parametrize("cause", ["cancelled", "lease_over", "client_gone", "environment_closed"])
def test_what_was_closed_by_a_cancel_or_its_lease_needs_no_close_and_what_is_unknown_is_told(
    peer: Any, settings: Settings, cause: str
) -> None:
    peer.behave = lambda seen: ActionFailed("it is gone", cause) if seen.kind == "cpu.close" else peer.usual(seen)

    async def close() -> None:
        async with AsyncClient(settings=settings) as client:
            await (await client.open(trajectory="a")).close()

    with Client(settings=settings) as client:
        for run in (client.open(trajectory="t").close, lambda: asyncio.run(close())):
            with pytest.raises(ActionFailed) if cause == "environment_closed" else nullcontext():
                run()


def test_leaving_the_context_by_an_exception_closes_what_was_opened(peer: Any, settings: Settings) -> None:
    # Given a stack that cannot close environments, which does not hide the first error
    peer.behave = lambda seen: ActionLost("node n1 is lost") if seen.kind == "cpu.close" else peer.usual(seen)
    with pytest.raises(ZeroDivisionError), Client(settings=settings) as client, client.open(trajectory="c") as inner:
        first, second = client.open(trajectory="a"), client.open(trajectory="b")
        client.open(trajectory="t", detached=True)
        for _ in range(2):
            with suppress(ActionLost):
                first.close()
        raise ZeroDivisionError
    # Then each was closed once, but for the detached one
    assert closed(peer) == [first.id, inner.id, second.id]
    assert [seen.header.get("detached", False) for seen in peer.seen if seen.kind == "cpu.open"] == [False, False, False, True]


def test_an_environment_that_could_not_be_opened_is_not_closed(peer: Any, settings: Settings) -> None:
    peer.behave = lambda seen: ActionFailed("no node has the label gpu")
    with Client(settings=settings) as client, pytest.raises(ActionFailed, match="label gpu"):
        client.open(trajectory="t", requires=["gpu"])
    assert peer.kinds() == ["cpu.open"]


def test_a_client_gives_signs_of_life_and_signs_what_it_sends(peer: Any, settings: Settings, redis_urls: Any) -> None:
    with redis_urls.client() as store, Client(settings=settings) as client:
        client.submit(Action(kind="my.task")).result(30)
        (seen,) = peer.seen
        # Given a sign that is a minute old
        assert silences(store, [seen.header["client"], "unheard-of"])["unheard-of"] is None
        key = CLIENT_KEY_PREFIX + seen.header["client"]

        def silent_s() -> float:
            return silences(store, [seen.header["client"]])[seen.header["client"]] or 0.0

        def made_old() -> bool:
            store.pexpire(key, store.pttl(key) - 60_000)
            return silent_s() >= 60.0

        # One that comes in between is made old, too.
        assert wait_until(made_old, 60)
        # Then the next one comes soon
        assert wait_until(lambda: silent_s() < 10.0, 60)


def test_a_closed_client_says_so(peer: Any, settings: Settings) -> None:
    client = Client(settings=settings)
    env, detached = client.open(trajectory="a"), client.open(trajectory="b", detached=True)
    peer.behave = lambda seen: peer.HOLD if seen.kind == "my.task" else peer.usual(seen)
    waiting = client.submit(Action(kind="my.task"))
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        client.submit(Action(kind="my.task"))
    # And its environments are closed, but for those that it leaves
    env.close()
    for left in (detached, client.environment("e")):
        with pytest.raises(ClientClosed, match="the client is closed"):
            left.close()
    assert closed(peer) == [env.id]
    with pytest.raises(ClientClosed, match="before the action had a result"):
        waiting.result(1)
    waiting.cancel()


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_client_that_is_closed_or_forgotten_leaves_no_thread_and_no_connection(
    peer: Any, settings: Settings, redis_urls: Any, is_closed: bool
) -> None:
    def connections() -> int:
        with redis_urls.client() as redis:
            return len(redis.client_list())

    with Client(settings=settings) as warm:
        warm.submit(Action(kind="my.task")).result(30)
    threads, before = set(threading.enumerate()), connections()
    client = Client(settings=settings)
    client.submit(Action(kind="my.task")).result(30)
    session = weakref.ref(client._session)
    if is_closed:
        client.close()
    del client
    gc.collect()
    assert session() is None and {thread.name for thread in set(threading.enumerate()) - threads} == set()
    # Redis notices a closed connection at its next turn.
    assert wait_until(lambda: connections() <= before, 60)


@pytest.mark.parametrize("held", [lambda env: env, lambda env: env.files, lambda env: env.submit("true"), lambda env: env._session])
def test_what_holds_a_client_says_what_to_make_in_another_process(env: Environment, held: Any) -> None:
    with pytest.raises(TypeError, match="make a Client in each one, and reach an environment by client.environment"):
        pickle.dumps(held(env))


def test_a_forked_child_is_told_to_open_its_own_client(peer: Any, settings: Settings) -> None:
    with Client(settings=settings) as client:
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                client.submit(Action(kind="my.task"))
                os.write(send, b"submitted")
            except ClientClosed as error:
                os.write(send, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert f"belongs to process {os.getpid()}" in os.read(receive, 1000).decode()
        os.close(receive)
        os.close(send)
        client.submit(Action(kind="my.task")).result(30)
