"""Several processes of a gateway, deaths of one, of connections: nothing runs twice, and no failure of ours is a verdict."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.gateway.conftest import MEMORY_MB, Served, options_of

pytestmark = pytest.mark.real

BLOCKING_MB = MEMORY_MB - 96
"""What leaves too little memory for anything else."""


def running_commands(served: Served) -> int:
    return len(served.live.rows("SELECT id FROM actions WHERE kind = 'cpu.exec' AND status = 'running'"))


def openings(served: Served) -> int:
    return len(served.live.rows("SELECT id FROM actions WHERE kind = 'cpu.open' AND status = 'waiting'"))


def test_what_one_process_began_another_one_ends_when_it_dies(pair: tuple[Served, Served]) -> None:
    first, second = pair
    key = {"Idempotency-Key": "k"}
    token = {"X-API-Key": first.token("tests")}
    with httpx.Client(headers=token, timeout=60) as http, ThreadPoolExecutor(3) as threads:
        # Given an environment of the first process, that the second one knows by the same key
        opened = http.post(f"{first.url}/api/v1/environments", json={"lease_s": 3600}, headers=key).json()
        assert http.post(f"{second.url}/api/v1/environments", json={"lease_s": 3600}, headers=key).json() == opened
        path = f"/api/v1/environments/{opened['id']}"
        slow = {"command": "echo ran >> ledger; while [ ! -e go ]; do sleep 0.05; done; cat ledger"}
        waiting = threads.submit(http.post, f"{first.url}{path}/exec", json=slow, headers=key)
        first.live.until(lambda: running_commands(first) == 1)
        # When the first one is killed, and its caller comes to the second one, twice
        first.live.process("gateway").kill()
        with pytest.raises(httpx.TransportError):
            waiting.result()
        again = [threads.submit(http.post, f"{second.url}{path}/exec", json=slow, headers=key) for _ in range(2)]
        assert http.post(f"{second.url}{path}/exec", json={"command": "touch go", "session": "other"}).json()["exit_code"] == 0
        assert [one.result().json()["stdout"] for one in again] == ["ran\n", "ran\n"]
        # And the second one closes what the first one opened, when its lease is over
        assert http.post(f"{second.url}{path}/lease", json={"lease_s": 0.1}).status_code == 200
        state = f"SELECT state FROM environments WHERE id = '{opened['id']}'"
        first.live.until(lambda: first.live.rows(state) == [("closed",)])


def test_an_environment_whose_gateway_dies_while_it_opens_is_open_once_a_shell_is_made(pair: tuple[Served, Served]) -> None:
    first, second = pair
    with httpx.Client(headers={"X-API-Key": first.token("tests")}, timeout=60) as http, ThreadPoolExecutor(1) as threads:
        # Given an environment that waits for memory
        blocking = http.post(f"{first.url}/api/v1/environments", json={"memory_mb": BLOCKING_MB}).json()["id"]
        opening = threads.submit(http.post, f"{first.url}/api/v1/environments", json={"name": "named", "memory_mb": 512})
        first.live.until(lambda: openings(first) == 1)
        # When its gateway is killed, and a client of SWE-ReX comes to another one
        first.live.process("gateway").kill()
        with pytest.raises(httpx.TransportError):
            opening.result()
        assert not http.get(f"{second.url}/envs/named/is_alive").json()["is_alive"]
        http.delete(f"{second.url}/api/v1/environments/{blocking}")
        assert http.post(f"{second.url}/envs/named/create_session", json={"startup_timeout": 60}).status_code == 200
        # Then the environment is known to be open, and there is one of it
        assert http.get(f"{second.url}/envs/named/is_alive").json()["is_alive"]
        assert [one["state"] for one in http.get(f"{second.url}/api/v1/environments").json()] == ["open"]


def test_a_process_of_e2b_is_joined_through_another_gateway_when_its_own_dies(pair: tuple[Served, Served]) -> None:
    e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")
    first, second = pair
    options = options_of(first, "tests")
    sandbox = e2b.Sandbox.create(**options)
    running = sandbox.commands.run("echo ran >> ledger; until [ -e go ]; do sleep 0.05; done; cat ledger", background=True)
    missed = sandbox.commands.run("until [ -e end ]; do sleep 0.05; done; echo missed; exit 3", background=True, timeout=0)
    first.live.until(lambda: running_commands(first) == 2)
    first.live.process("gateway").kill()
    with pytest.raises(e2b.exceptions.SandboxUnreachableException):
        running.wait()
    # Then the second one knows sandbox and process, and the command runs once
    again = e2b.Sandbox.connect(sandbox.sandbox_id, **{**options, "api_url": second.url, "sandbox_url": second.url})
    again.files.write("end", "")
    first.live.until(lambda: running_commands(first) == 1)
    # And what ended meanwhile, of a command that began long ago, it has too
    with first.store() as store:
        processes, field = f"tangram-gw-e2b-{sandbox.sandbox_id}", f"process:{missed.pid}"
        store.hset(processes, field, re.sub(rb'"started_at":[\d.]+', b'"started_at":1.0', store.hget(processes, field)))
    assert [one.pid for one in again.commands.list()] == [running.pid]
    with pytest.raises(e2b.CommandExitException) as ended:
        again.commands.connect(missed.pid).wait()
    assert (ended.value.exit_code, ended.value.stdout) == (3, "missed\n")
    joined = again.commands.connect(running.pid)
    again.files.write("go", "")
    assert joined.wait().stdout == "ran\n"
    assert again.commands.list() == []
