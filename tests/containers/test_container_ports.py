"""Requests to servers in containers: the network is the container's, whichever session the server is of."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers_cpu.support import RUN, is_low, printed, until
from tests.workers_cpu.test_ports import ask
from workers.cpu.abstract import EnvironmentSpec, Holding
from workers.cpu.docker.environment import ContainerEnvironment
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone, NoAnswer, NothingListens
from workers.cpu.ports.exchange import HttpRequest
from workers.cpu.ports.wait import Wait
from workers.cpu.process import tree

from .conftest import NODE
from .support import box_of
from .test_container_background import container_folder, counts_for, quota_of
from .test_container_network import docker

HERE = sorted(os.sched_getaffinity(0))
LISTENS = 'until grep -qi ":$(printf %04x {port}) .* 0A " /proc/net/tcp*; do usleep 20000; done'


@pytest.fixture
def env(shared: ContainerEnvironment) -> ContainerEnvironment:
    """Give the environment that the tests share."""
    return shared


def serve(env: ContainerEnvironment, port: int = 8000, *, session: str = "main", word: str = "here") -> None:
    """Have a command of a session leave busybox' server running, which gives the file `word`."""
    printed(env, f"mkdir -p {word}; echo {word} > {word}/word")
    server = f"busybox httpd -f -p 127.0.0.1:{port} -h $PWD/{word} >/dev/null 2>&1 &"
    printed(env, f"{server} {LISTENS.format(port=port)}", session)


def answers_never(env: ContainerEnvironment, port: int) -> int:
    """Leave something running that takes one connection and says nothing; return its process."""
    program = f"nc -l -p {port} -e sleep 307.{port}{RUN}"
    printed(env, f"{program} >/dev/null 2>&1 & {LISTENS.format(port=port)}", "never")
    lines = {pid: tree.command_line(pid) for pid in env.container.group.processes()}
    (listening,) = [pid for pid, line in lines.items() if line.replace(b"\0", b" ").strip() == program.encode()]
    return listening


def test_servers_of_all_sessions_are_reached(env: ContainerEnvironment) -> None:
    for number, session in enumerate(("one", "two")):
        serve(env, 8000 + number, session=session, word=session)
    answers = [ask(env, 8000 + number, "/word") for number in (0, 1)]
    assert [(answer.status, answer.body) for answer in answers] == [(200, b"one\n"), (200, b"two\n")]
    assert ask(env, 8000, "/nowhere").status == 404


def test_neither_the_host_nor_another_container_is_reached(tmp_path: Path, options: ContainerOptions) -> None:
    with box_of(tmp_path / "box", options) as box, socket.socket() as host:
        one, other = (box.open(EnvironmentSpec(id=name)) for name in ("one", "other"))
        serve(one)
        serve(other, 8001)
        host.bind(("127.0.0.1", 0))
        host.listen()
        for port in (8001, host.getsockname()[1]):
            with pytest.raises(NothingListens, match=f"port {port}"):
                ask(one, port)


def test_a_container_on_a_named_network_is_reached_by_its_loopback(tmp_path: Path, options: ContainerOptions) -> None:
    name = f"{NODE}-ports"
    docker("network", "create", "--internal", name)
    try:
        with box_of(tmp_path / "box", replace(options, network=name)) as box:
            env = box.open(EnvironmentSpec(id="e1"))
            serve(env)
            assert ask(env, 8000, "/word").body == b"here\n"
    finally:
        docker("network", "rm", name)


def test_no_thread_of_the_worker_stays_in_a_container(env: ContainerEnvironment) -> None:
    serve(env)
    own = os.readlink("/proc/self/ns/net")
    assert ask(env, 8000, "/word").status == 200

    def networks() -> set[str]:
        found = set()
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(FileNotFoundError):  # one that ends just now
                found.add(os.readlink(f"/proc/self/task/{thread}/ns/net"))
        return found

    # The kernel may have a thread for a moment after it was joined.
    assert until(lambda: networks() == {own})


def test_what_is_parked_has_the_core_of_the_request_while_that_runs(env: ContainerEnvironment) -> None:
    # Given something that listens, which a command has left: it may use next to nothing
    pid = answers_never(env, 8100)
    assert 0 < quota_of(pid) < 10_000
    # When it is asked; then it has the core of the request, and its container counts for one
    ended: list[type[Exception]] = []

    def never(wait: Wait) -> None:
        try:
            env.request(HttpRequest(port=8100, method="GET", path="/"), Holding((HERE[-1],)), wait)
        except Exception as error:
            ended.append(type(error))

    with Wait(60) as wait:
        asking = threading.Thread(target=never, args=(wait,))
        asking.start()
        assert until(lambda: quota_of(pid) < 0 and os.sched_getaffinity(pid) == {HERE[-1]})
        assert not is_low(container_folder(env)) and counts_for(container_folder(env)) == 1
        wait.cancel("over")
        asking.join(60)
    # When it has ended; then that is over
    assert len(ended) == 1
    assert 0 < quota_of(pid) < 10_000


def test_a_request_to_a_container_that_ends_says_that_it_is_lost(module_sandbox: ContainerSandbox) -> None:
    env = module_sandbox.open(EnvironmentSpec(id="mortal"))
    serve(env)
    docker("kill", env.container.id)
    assert until(lambda: env.container.has_ended())
    with pytest.raises(EnvironmentGone, match="lost"):
        ask(env, 8000, "/word")


def test_an_answer_that_is_no_http_is_the_programs_failure(env: ContainerEnvironment) -> None:
    printed(env, f"nc -l -p 8200 -e echo SSH-2.0-server >/dev/null 2>&1 & {LISTENS.format(port=8200)}")
    with pytest.raises(NoAnswer):
        ask(env, 8200)
