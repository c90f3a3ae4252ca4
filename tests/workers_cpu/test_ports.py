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
from workers.cpu.abstract import Holding
from workers.cpu.errors import EnvironmentGone, NoAnswer, NothingListens, RequestUnusable
from workers.cpu.ports.exchange import HttpAnswer, HttpRequest
from workers.cpu.ports.wait import Wait
from workers.cpu.process.environment import ProcessEnvironment
from workers.cpu.process.isolation import IsolationChoice
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import environment_in, make
from .support import RUN, in_background, open_one, printed, processes_with, until

HERE = sorted(os.sched_getaffinity(0))
SERVER = Path(__file__).with_name("ports_server.py").read_bytes()
numbers = count()


@contextmanager
def unused_port() -> Iterator[int]:
    """Give a port on which nothing can listen as long as the block lasts."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def serve(env: ProcessEnvironment, port: int = 0, *, address: str = "127.0.0.1", session: str = "main", word: str = "here") -> int:
    """Have a command of a session leave a server running; return its port, by default one that the kernel chooses."""
    ready = f"ready{next(numbers)}"
    env.write_file("server.py", SERVER)
    begin = f"cd; python3 server.py {address} {port} $PWD/{ready} {word} >/dev/null 2>&1 &"
    return int(printed(env, f"{begin} until [ -e $HOME/{ready} ]; do sleep 0.02; done; cat $HOME/{ready}", session))


def ask(
    env: ProcessEnvironment, port: int, path: str = "/", *, limit_s: float = 60.0, method: str = "GET", body: bytes = b""
) -> HttpAnswer:
    """Send a request."""
    with Wait(limit_s) as wait:
        return env.request(HttpRequest(port=port, method=method, path=path, body=body), Holding((HERE[0],)), wait)


@pytest.fixture(scope="module", params=["none", "bubblewrap"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcessEnvironment, int]]:
    """Give an environment of each kind in which a server runs, and its port."""
    isolation: IsolationChoice = request.param
    box = make(tmp_path_factory.mktemp("ports") / "box", isolation)
    for env in environment_in(box):
        yield env, serve(env)
    box.close()


@contextmanager
def host_service(port: int = 0) -> Iterator[socket.socket]:
    """Listen on the loopback of the host, as a service of it would."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))
        listening.listen()
        listening.setblocking(False)
        yield listening


def test_a_server_that_a_command_left_running_answers(served: tuple[ProcessEnvironment, int]) -> None:
    env, port = served
    answer = ask(env, port)
    assert (answer.status, answer.body) == (200, b"here GET")
    assert list(answer.headers) == [("content-type", "text/plain"), ("set-cookie", "a"), ("set-cookie", "b")]
    assert ask(env, port, method="POST", body=b"x" * 100_000).body == b"here POST"


def test_servers_of_two_sessions_are_reached_each_by_its_port(either: ProcessEnvironment) -> None:
    ports = [serve(either, session=session, word=session) for session in ("one", "two")]
    assert [ask(either, port).body for port in ports] == [b"one GET", b"two GET"]


def test_of_two_sessions_with_a_loopback_each_the_first_has_a_port_that_both_listen_on(inside: ProcessEnvironment) -> None:
    port = serve(inside, session="one", word="one")
    serve(inside, port, session="two", word="two")
    assert ask(inside, port).body == b"one GET"
    inside.close_session("one")
    assert ask(inside, port).body == b"two GET"


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "::1"])
def test_a_server_may_listen_on_all_addresses_or_on_either_loopback(either: ProcessEnvironment, address: str) -> None:
    if ":" in address and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert ask(either, serve(either, address=address)).body == b"here GET"


def test_a_port_on_which_nothing_listens_is_named(either: ProcessEnvironment) -> None:
    # Given an environment without a session, then one in which nothing runs, then one with another server
    with unused_port() as port:
        for prepare in (lambda: None, lambda: printed(either, "true"), lambda: serve(either)):
            prepare()
            with pytest.raises(NothingListens, match=rf"port {port}: .*127\.0\.0\.1"):
                ask(either, port)


def test_a_service_of_the_host_is_never_reached(either: ProcessEnvironment) -> None:
    serve(either)
    with host_service() as listening:
        with pytest.raises(NothingListens):
            ask(either, listening.getsockname()[1])
        # Then it has not even been connected to
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_service_of_the_host_that_is_nearer_than_the_servers_socket_is_not_reached(sandbox_on_host: ProcessSandbox) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    # Given a service on the host's loopback, and a server of an environment on the same port of all addresses of IPv6
    env = open_one(sandbox_on_host)
    with host_service() as listening:
        port = serve(env, listening.getsockname()[1], address="::")
        # Then the server is asked, where nobody but it can answer
        assert ask(env, port).body == b"here GET"
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.fixture
def sandbox_on_host(tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a sandbox that is not set apart."""
    box = make(tmp_path / "host", "none")
    yield box
    box.close()


def test_a_server_of_another_environment_is_not_reached(sandbox_on_host: ProcessSandbox) -> None:
    one, other = open_one(sandbox_on_host, "one"), open_one(sandbox_on_host, "other")
    port = serve(one)
    printed(other, "sleep 300 >/dev/null 2>&1 &")
    with pytest.raises(NothingListens):
        ask(other, port)
    assert ask(one, port).status == 200


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
    ],
)
def test_a_wrong_answer_is_the_programs_failure(
    served: tuple[ProcessEnvironment, int], path: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.cpu.ports.exchange.MOST_BODY_BYTES", 1 << 20)
    env, port = served
    with pytest.raises(NoAnswer, match=problem) as caught:
        ask(env, port, path)
    assert (caught.value.cause, caught.value.fault) == ("no_answer", "program")
    # Then the server is asked again as if nothing had been
    assert ask(env, port).status == 200


@pytest.mark.parametrize("path", ["/never", "/slowly", "/announcing"])
def test_an_answer_that_does_not_end_in_time_is_a_timeout(served: tuple[ProcessEnvironment, int], path: str) -> None:
    env, port = served
    with pytest.raises(ActionTimedOut) as caught:
        ask(env, port, path, limit_s=0.3)
    assert (caught.value.cause, caught.value.fault) == ("timeout", "program")


def test_a_request_may_have_the_longest_time_that_an_action_may_name(served: tuple[ProcessEnvironment, int]) -> None:
    env, port = served
    assert ask(env, port, limit_s=LONGEST_S).status == 200


def test_an_answer_that_comes_before_the_body_was_read_counts(served: tuple[ProcessEnvironment, int]) -> None:
    env, port = served
    answer = ask(env, port, "/early", method="POST", body=bytes(8 << 20))
    assert (answer.status, answer.body) == (413, b"stop!")


def test_answers_that_only_announce_another_are_passed_over(served: tuple[ProcessEnvironment, int]) -> None:
    env, port = served
    assert ask(env, port, "/continue").body == b"ok"


def test_a_request_that_cannot_be_written_is_the_callers_fault(served: tuple[ProcessEnvironment, int]) -> None:
    env, port = served
    for wrong in ({"path": "/a b"}, {"method": "GET\r\nX: y"}, {"headers": [("X", "a\r\nY: b")]}, {"headers": [("X", "€")]}):
        words = {"port": port, "method": "GET", "path": "/", **wrong}
        with Wait(60) as wait, pytest.raises(RequestUnusable):
            env.request(HttpRequest(**words), Holding(), wait)  # type: ignore[arg-type]
    with pytest.raises(RequestUnusable):
        HttpRequest(port=0, method="GET", path="/")


def test_a_request_is_cancelled(served: tuple[ProcessEnvironment, int]) -> None:
    env, port = served
    with Wait(60) as wait:
        timer = threading.Timer(0.2, lambda: wait.cancel("the trainer said so"))
        timer.start()
        with pytest.raises(ActionCancelled, match="the trainer said so"):
            env.request(HttpRequest(port=port, method="GET", path="/never"), Holding(), wait)
        timer.join()


def test_a_request_ends_with_its_environment(either: ProcessEnvironment) -> None:
    port, errors = serve(either), list[Exception]()

    def never() -> None:
        try:
            ask(either, port, "/never")
        except Exception as error:
            errors.append(error)

    asking = threading.Thread(target=never)
    asking.start()
    assert until(lambda: either.is_busy)
    either.close()
    asking.join(60)
    assert [type(error) for error in errors] in ([ActionCancelled], [EnvironmentGone])
    assert "closed" in str(errors[0])
    with pytest.raises(EnvironmentGone):
        ask(either, port)


@pytest.mark.parametrize("isolation", ["none", "bubblewrap"])
def test_a_server_in_the_background_has_the_core_of_the_request(tmp_path: Path, isolation: IsolationChoice) -> None:
    # Given servers that commands of two sessions left: they are in the background
    box = make(tmp_path / "box", isolation)
    env = open_one(box)
    words = [f"{session}-{RUN}" for session in ("one", "two")]
    ports = [serve(env, session=word, word=word) for word in words]
    pids = [pid for word in words for pid in processes_with(f"\x00{word}\x00")]
    assert len(pids) == 2 and all(in_background(pid, box.background) for pid in pids)
    # When one of them is asked; then they are not, and are on the core of the request
    ended: list[str] = []

    def never(wait: Wait) -> None:
        try:
            env.request(HttpRequest(port=ports[0], method="GET", path="/never"), Holding((HERE[0],)), wait)
        except ActionCancelled as error:
            ended.append(str(error))

    with Wait(60) as wait, Wait(60) as other:
        asking = threading.Thread(target=never, args=(wait,))
        asking.start()
        assert until(lambda: all(os.sched_getaffinity(pid) == {HERE[0]} for pid in pids))
        # The core is given first, and the priority after it.
        assert until(lambda: box.background == "affinity" or not any(in_background(pid, box.background) for pid in pids))
        # When another request has been answered meanwhile, on another core; then they still are
        env.request(HttpRequest(port=ports[1], method="GET", path="/"), Holding((HERE[-1],)), other)
        assert all(os.sched_getaffinity(pid) == {HERE[0]} for pid in pids)
        wait.cancel("over")
        asking.join(60)
    # When it has ended; then they are in the background again
    assert ended == ["over"]
    assert until(lambda: all(in_background(pid, box.background) for pid in pids))
    box.close()
