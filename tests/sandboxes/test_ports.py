"""Requests to servers that run in an environment: what is reached, what is not, and what servers may answer."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tangram.action import LONGEST_S
from tangram.errors import ActionCancelled, ActionTimedOut
from tests.workers_cpu.support import HERE, RUN, printed, processes_with, until
from workers.cpu.abstract import Environment, EnvironmentSpec, Holding, Sandbox
from workers.cpu.errors import EnvironmentGone, NoAnswer, NothingListens, RequestUnusable
from workers.cpu.ports.exchange import HttpAnswer, HttpRequest
from workers.cpu.ports.wait import Wait

from .conftest import Boxes, Kind
from .support import is_held_back

SERVER = Path(__file__).with_name("ports_server.py").read_bytes()
numbers = count()
Served = tuple[Environment, int]


@contextmanager
def unused_port() -> Iterator[int]:
    """Give a port on which nothing can listen as long as the block lasts."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


@contextmanager
def host_service() -> Iterator[socket.socket]:
    """Listen on the loopback of the host, as a service of it would."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listening.setblocking(False)
        yield listening


def serve(env: Environment, port: int = 0, *, address: str = "127.0.0.1", session: str = "main", word: str = "here") -> int:
    """Have a command of a session leave a server running; return its port, by default one that the kernel chooses."""
    ready = f"ready{next(numbers)}"
    env.write_file("server.py", SERVER)
    begin = f"cd; python3 server.py {address} {port} $PWD/{ready} {word} >/dev/null 2>&1 &"
    return int(printed(env, f"{begin} until [ -e $HOME/{ready} ]; do sleep 0.02; done; cat $HOME/{ready}", session))


def ask(env: Environment, port: int, path: str = "/", *, limit_s: float = 60.0, method: str = "GET", body: bytes = b"") -> HttpAnswer:
    with Wait(limit_s) as wait:
        return env.request(HttpRequest(port=port, method=method, path=path, body=body), Holding((HERE[0],)), wait)


@contextmanager
def asked_in_vain(env: Environment, port: int, core: int, wait: Wait) -> Iterator[list[Exception]]:
    """Have a request wait for its answer as long as the block lasts; how it ended is there afterwards."""
    errors: list[Exception] = []

    def never() -> None:
        try:
            env.request(HttpRequest(port=port, method="GET", path="/never"), Holding((core,)), wait)
        except Exception as error:
            errors.append(error)

    asking = threading.Thread(target=never)
    asking.start()
    assert until(lambda: env.is_busy)  # type: ignore[attr-defined]
    yield errors
    asking.join(60)


@pytest.fixture(scope="module")
def served(boxes: Boxes) -> Iterator[Served]:
    """Give an environment in which a server runs, and its port: what becomes of a request that has reached one is alike in each kind."""
    env = boxes("process").open(EnvironmentSpec(id="served"))
    yield env, serve(env)
    env.close()


def test_a_server_that_a_command_left_running_answers(served: Served) -> None:
    env, port = served
    answer = ask(env, port)
    assert (answer.status, answer.body) == (200, b"here GET")
    assert list(answer.headers) == [("content-type", "text/plain"), ("set-cookie", "a"), ("set-cookie", "b")]
    assert ask(env, port, method="POST", body=b"x" * 100_000).body == b"here POST"
    assert ask(env, port, limit_s=LONGEST_S).status == 200


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "::1"])
def test_a_server_may_listen_on_all_addresses_or_on_either_loopback(env: Environment, address: str) -> None:
    if ":" in address and not printed(env, "cat /proc/net/if_inet6; :"):
        pytest.skip("there is no IPv6")
    assert ask(env, serve(env, address=address)).body == b"here GET"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("place", ["process"])
def test_a_service_of_the_host_that_is_nearer_than_the_servers_socket_is_not_reached(env: Environment) -> None:
    # Given a service on the host's loopback, and a server of an environment on the same port of all addresses of IPv6
    with host_service() as listening:
        assert ask(env, serve(env, listening.getsockname()[1], address="::")).body == b"here GET"
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_port_on_which_nothing_listens_is_named(env: Environment) -> None:
    # Given an environment without a session, then one in which nothing runs, then one with another server
    with unused_port() as port:
        for prepare in (lambda: None, lambda: printed(env, "true"), lambda: serve(env)):
            prepare()
            with pytest.raises(NothingListens, match=rf"port {port}: .*127\.0\.0\.1"):
                ask(env, port)


def test_neither_the_host_nor_another_environment_is_reached(sandbox: Sandbox, env: Environment) -> None:
    serve(env)
    neighbour = sandbox.open(EnvironmentSpec(id="neighbour"))
    with host_service() as listening:
        for port in (listening.getsockname()[1], serve(neighbour)):
            with pytest.raises(NothingListens):
                ask(env, port)
        with pytest.raises(BlockingIOError):
            listening.accept()
    neighbour.close()


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/garbage", "as HTTP has it"),
        ("/upgrade", "as HTTP has it"),
        ("/silent", "without an answer|broke off"),
        ("/cut", "as HTTP has it|broke off"),
        ("/head", "as HTTP has it"),
        ("/status", "as HTTP has it: .*799"),
        ("/control", "as HTTP has it: .*header x"),
        ("/endless", "more than 1048576 bytes"),
        ("/announcing", "more than 1000 pieces"),
        ("/crumbs", "more than 1000 pieces"),
    ],
)
def test_a_wrong_answer_is_the_programs_failure(served: Served, path: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.cpu.ports.exchange.MOST_BODY_BYTES", 1 << 20)
    monkeypatch.setattr("workers.cpu.ports.exchange.MOST_EVENTS", 1000)
    env, port = served
    with pytest.raises(NoAnswer, match=problem) as caught:
        ask(env, port, path)
    assert (caught.value.cause, caught.value.fault) == ("no_answer", "program")
    assert ask(env, port).status == 200


@pytest.mark.parametrize("path", ["/never", "/slowly"])
def test_an_answer_that_does_not_end_in_time_is_a_timeout(served: Served, path: str) -> None:
    env, port = served
    with pytest.raises(ActionTimedOut) as caught:
        ask(env, port, path, limit_s=0.3)
    assert (caught.value.cause, caught.value.fault) == ("timeout", "program")


@pytest.mark.parametrize(
    ("path", "method", "body", "answered"),
    [("/early", "POST", bytes(8 << 20), (413, b"stop!")), ("/continue", "GET", b"", (200, b"ok"))],
    ids=["before the body was read", "after fifty that announce it"],
)
def test_an_answer_counts_whenever_it_comes(served: Served, path: str, method: str, body: bytes, answered: tuple[int, bytes]) -> None:
    env, port = served
    answer = ask(env, port, path, method=method, body=body)
    assert (answer.status, answer.body) == answered


def test_a_request_that_cannot_be_written_is_the_callers_fault(served: Served) -> None:
    env, port = served
    for wrong in ({"path": "/a b"}, {"method": "GET\r\nX: y"}, {"headers": [("X", "a\r\nY: b")]}, {"headers": [("X", "€")]}):
        words = {"port": port, "method": "GET", "path": "/", **wrong}
        with Wait(60) as wait, pytest.raises(RequestUnusable):
            env.request(HttpRequest(**words), Holding(), wait)  # type: ignore[arg-type]
    with pytest.raises(RequestUnusable):
        HttpRequest(port=0, method="GET", path="/")


def test_a_request_is_cancelled(served: Served) -> None:
    with Wait(60) as wait, asked_in_vain(*served, HERE[0], wait) as errors:
        wait.cancel("the trainer said so")
    assert [(type(error), str(error)) for error in errors] == [(ActionCancelled, "the trainer said so")]


def test_a_request_ends_with_its_environment(env: Environment) -> None:
    port = serve(env)
    with Wait(60) as wait, asked_in_vain(env, port, HERE[0], wait) as errors:
        env.close()
    assert [type(error) for error in errors] in ([ActionCancelled], [EnvironmentGone])
    assert "closed" in str(errors[0])
    with pytest.raises(EnvironmentGone):
        ask(env, port)


def test_a_server_that_was_left_running_is_reached_by_its_port_and_has_the_core_of_the_request(
    kind: Kind, sandbox: Sandbox, env: Environment
) -> None:
    # Given servers that commands of two sessions left: they are held back
    words = [f"{session}-{RUN}" for session in ("one", "two")]
    ports = [serve(env, session=word, word=word) for word in words]
    pids = [pid for word in words for pid in processes_with(f"\x00{word}\x00")]
    assert len(pids) == 2 and all(is_held_back(kind, sandbox, pid) for pid in pids)
    # When one of them is asked; then they are not, and are on the core of the request
    with Wait(60) as wait, Wait(60) as other, asked_in_vain(env, ports[0], HERE[0], wait) as errors:
        assert until(lambda: all(os.sched_getaffinity(pid) == {HERE[0]} for pid in pids))
        # The core is given first, and the priority after it
        assert until(lambda: sandbox.background == "affinity" or not any(is_held_back(kind, sandbox, pid) for pid in pids))
        # When another request has been answered meanwhile, on another core; then they still are
        answer = env.request(HttpRequest(port=ports[1], method="GET", path="/"), Holding((HERE[-1],)), other)
        assert answer.body == f"{words[1]} GET".encode()
        assert all(os.sched_getaffinity(pid) == {HERE[0]} for pid in pids)
        wait.cancel("over")
    assert [str(error) for error in errors] == ["over"]
    assert until(lambda: all(is_held_back(kind, sandbox, pid) for pid in pids))
