"""Finding the stack, and saying clearly when it is not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.connection import parse_url

from tangram import Action, AsyncClient, Client, Settings, StackUnreachable, Unknown
from tangram.connection import Addresses, find_addresses, find_link, redis_url, show

ALLOWED_S = 1.5
"""What a client is allowed to wait for a part that does not answer. What is there may take longer on a busy machine."""


@pytest.fixture(autouse=True)
def no_urls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the surroundings out of the tests."""
    for name in ("TANGRAM_BROKER_URL", "TANGRAM_RESULT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TANGRAM_STATE_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def each_part_answers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a client wait until each part has answered or failed by itself, so that it names the one that failed."""
    monkeypatch.setattr("tangram.session._START_SLACK_S", 60.0)


@contextlib.contextmanager
def mute_server() -> Iterator[int]:
    """Accept connections and never say a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_without_a_stack_one_line_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StackUnreachable) as caught:
        Client()
    assert str(caught.value) == (
        f"no stack is running in {tmp_path}: start one with `tangram up`, or set TANGRAM_STATE_DIR to the folder of one that runs, "
        "or TANGRAM_BROKER_URL and TANGRAM_RESULT_URL to a deployment's"
    )


def test_the_embedded_stack_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text(json.dumps({"broker_url": "redis://b", "result_url": "redis://r", "database_url": "x"}))
    assert find_addresses(Settings()) == Addresses("redis://b", "redis://r")


def test_settings_come_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "stack.json").write_text("not read")
    given = Settings(broker_url="amqp://b", result_url="redis://r")
    assert find_addresses(given) == Addresses("amqp://b", "redis://r")


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("", "required"),
        ("?ssl_cert_reqs=CERT_OPTIONAL", "optional"),
        ("?ssl_cert_reqs=none", "none"),
        (f"?ssl_ca_certs={__file__}", "required"),
    ],
)
def test_certificates_of_redis_are_checked_unless_its_address_says_otherwise(query: str, word: str) -> None:
    link = find_link(Settings(broker_url=f"rediss://:p%40s@b/2{query}", result_url=f"rediss://:p%40s@r/2{query}"))
    of_broker = link.app.connection_for_write().ssl["ssl_cert_reqs"]
    of_store = link.store.connection_pool.connection_kwargs["ssl_cert_reqs"]
    assert (ssl.VerifyMode(of_broker).name, of_store) == (f"CERT_{word.upper()}", word)


def test_a_wrong_word_for_certificates_of_redis_is_named() -> None:
    with pytest.raises(StackUnreachable, match="TANGRAM_RESULT_URL has ssl_cert_reqs=sometimes, which is none of required, optional, none"):
        find_addresses(Settings(broker_url="redis://b", result_url="rediss://r?ssl_cert_reqs=sometimes"))


@pytest.mark.parametrize("text", ["", "[]", '{"broker_url": 1}', "\x00"])
def test_a_broken_stack_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(StackUnreachable, match=r"stack\.json is no stack file"):
        find_addresses(Settings())


def test_half_an_address_is_refused_and_so_are_results_outside_of_redis_without_their_password() -> None:
    with pytest.raises(StackUnreachable, match="TANGRAM_RESULT_URL is not set"):
        find_addresses(Settings(broker_url="redis://b"))
    with pytest.raises(StackUnreachable, match="must be Redis") as caught:
        find_addresses(Settings(broker_url="redis://b", result_url="db+postgresql://me:geheim@host/db"))
    assert "geheim" not in str(caught.value)
    assert "geheim" not in show("redis://:geheim@host:1/0")
    assert show("amqp://me:ge@heim@[::1]:1//") == show("amqp://me:ge\nheim@[::1]:1//") == "amqp://me:**@[::1]:1//"


@pytest.mark.parametrize(
    "url",
    [
        "redis://:geheim/@h:1/0",
        "redis://[::1/0",
        "redis://h:1/0;redis://h:geheim/0",
        "redis://:p@s/s:geheim@h:1/0",
        "redis://:1#geheim@h:1/0",
        "redis://h:1/geheim",
        "amqps://u:p@s/geheim@h/v",
    ],
)
def test_an_address_that_cannot_be_read_is_named_without_a_part_of_its_password(url: str) -> None:
    for name, settings in (
        ("TANGRAM_BROKER_URL", Settings(broker_url=url, result_url="redis://r")),
        ("TANGRAM_RESULT_URL", Settings(broker_url="redis://b", result_url=url)),
    ):
        with pytest.raises(StackUnreachable, match=f"{name} is no address") as caught:
            find_addresses(settings)
        assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("celery", "expected"),
    [
        ("redis://h:7/2", {"host": "h", "port": 7, "db": 2}),
        ("redis://:p%40s@h/0", {"host": "h", "password": "p@s", "db": 0}),
        ("redis+socket:///run/r.sock?virtual_host=3", {"path": "/run/r.sock", "db": 3}),
        ("redis+socket:///run/r.sock", {"path": "/run/r.sock", "db": 0}),
        ("redis+socket://:p%40s@/run/r.sock?virtual_host=/1", {"path": "/run/r.sock", "db": 1, "password": "p@s"}),
    ],
)
def test_celery_addresses_mean_the_same_to_redis_py(celery: str, expected: dict[str, Any]) -> None:
    parsed: dict[str, Any] = dict(parse_url(redis_url(celery)))  # type: ignore[no-untyped-call]
    assert {name: parsed.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": "h"}),
        (
            f"ssl_cert_reqs=CERT_REQUIRED&ssl_ca_certs={__file__}",
            {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": __file__, "server_hostname": "h"},
        ),
        ("ssl_cert_reqs=none&heartbeat=9", {"cert_reqs": ssl.CERT_NONE}),
        ("ssl_cert_reqs=sometimes", "ssl_cert_reqs=sometimes, which is none of required, optional, none"),
        ("ssl_ca=/ca.pem", "ssl_ca, which there is not for amqps://"),
        ("ssl_ca_certs=/no/ca.pem", "ssl_ca_certs=/no/ca.pem, which cannot be read: No such file or directory"),
    ],
)
def test_an_address_of_rabbitmq_says_how_its_certificate_is_checked(query: str, expected: dict[str, Any] | str) -> None:
    given = Settings(broker_url=f"amqps://u:secret@h/v?{query}", result_url="redis://h")
    if isinstance(expected, str):
        with pytest.raises(StackUnreachable) as told:
            find_link(given)
        assert str(told.value) == f"TANGRAM_BROKER_URL has {expected}"
    else:
        conf = find_link(given).app.conf
        assert conf.broker_use_ssl == expected
        assert conf.broker_url == "amqps://u:secret@h/v" + "?heartbeat=9" * ("heartbeat" in query)


def test_an_unreachable_part_is_told(redis_urls: Any) -> None:
    with mute_server() as port, ThreadPoolExecutor(8) as threads:
        redis = ("redis://127.0.0.1:1/0", "redis+socket:///no/such.sock?virtual_host=0", f"redis://:geheim@127.0.0.1:{port}/0")
        amqp = ("amqp://guest:geheim@127.0.0.1:1//", f"amqp://guest:geheim@127.0.0.1:{port}//")
        bad = [*({"broker_url": url} for url in (*redis, *amqp)), *({"result_url": url} for url in redis)]
        good = {"broker_url": redis_urls.broker, "result_url": redis_urls.result}

        def refusal(urls: dict[str, str]) -> str:
            with pytest.raises(StackUnreachable) as caught:
                Client(settings=Settings(**{**good, **urls}, connect_timeout_s=ALLOWED_S))
            return str(caught.value)

        for urls, said in zip(bad, threads.map(refusal, bad), strict=True):
            assert ("broker" if "broker_url" in urls else "result store") in said, (urls, said)
            assert "\n" not in said and "geheim" not in said


def test_an_unreachable_stack_holds_up_no_event_loop_and_who_gives_it_up_breaks_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before, broken = threading.enumerate(), list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", broken.append)

    async def scenario() -> None:
        # Given a server of the same loop, which takes connections and never says a word
        came, over = asyncio.Event(), asyncio.Event()

        async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.set()
            with contextlib.closing(writer):
                await over.wait()

        async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
            url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
            connecting = asyncio.ensure_future(
                AsyncClient(settings=Settings(broker_url=url, result_url=url, connect_timeout_s=30.0)).__aenter__()
            )
            # Then the loop serves its connection while it waits for an answer
            await came.wait()
            assert not connecting.done()
            # And when the client is given up, its threads end
            connecting.cancel()
            over.set()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    for thread in {*threading.enumerate()} - {*before}:
        thread.join(60)
    assert not broken


def test_a_cancel_that_cannot_be_sent_is_told(redis_urls: Any, own_redis: Any) -> None:
    # Given an action under way, and a broker that goes away
    given = Settings(broker_url=own_redis.broker, result_url=redis_urls.result, connect_timeout_s=ALLOWED_S, outage_s=ALLOWED_S)
    with Client(settings=given) as client:
        handle = client.submit(Action(kind="my.task"))
        with own_redis.client() as redis:
            while not redis.llen("actions"):
                time.sleep(0.01)
        own_redis.stop()
        # When a trajectory and that action are to be cancelled; then both callers hear that they are not
        with pytest.raises(StackUnreachable, match="broker"):
            client.cancel(trajectory="t")
        handle.cancel()
        with pytest.raises(Unknown, match="its cancel could not be sent"):
            handle.result(60)
        # And once the broker is back, the next one is there when the call returns; that of the action is sent with it
        own_redis.start()
        client.cancel(trajectory="t")
        with own_redis.client() as redis:
            assert redis.llen("scheduler.control") == 2


def test_giving_up_on_a_cancel_that_is_not_sent_yet_costs_nothing_else(redis_urls: Any, own_redis: Any) -> None:
    given = Settings(broker_url=own_redis.broker, result_url=redis_urls.result, connect_timeout_s=5.0, outage_s=60.0)

    async def scenario() -> None:
        async with AsyncClient(settings=given) as client:
            # Given a broker that is away, and a coroutine that does not wait for its cancel to be sent
            own_redis.stop()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await client.cancel(trajectory="t")
            first = await client.submit(Action(kind="my.task"))
            own_redis.start()
            last = await client.submit(Action(kind="my.last"))
            await client.cancel(trajectory="u")
            # Then everything was sent once, and nothing is said to have failed
            with own_redis.client() as redis:
                assert (redis.llen("scheduler.control"), redis.llen("actions")) == (2, 2)
            assert not first.done() and not last.done()

    asyncio.run(asyncio.wait_for(scenario(), 200))


def test_a_result_store_that_stays_away_ends_the_wait_and_so_does_closing(own_redis: Any) -> None:
    given = Settings(broker_url=own_redis.broker, result_url=own_redis.result, connect_timeout_s=ALLOWED_S, outage_s=0.2)
    with Client(settings=given) as client:
        handle = client.submit(Action(kind="my.task"))
        client.cancel(trajectory="none")  # so that the broker has it
        own_redis.stop()
        with pytest.raises(Unknown, match="result store") as told:
            handle.result(60)
        assert told.value.id == handle.id
        waiting = client.submit(Action(kind="my.task"))
    assert waiting.done()
