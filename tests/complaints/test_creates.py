"""A create whose answer never arrives leaves no second sandbox, and a sandbox that has died is never replaced by a blank one in silence.

Source: allenai/open-instruct #1887 (a create that a 504 cut was orphaned; restarts that began blank; 5 to 15 % of rewards a false 0),
harbor #2655 (an ambiguous create made duplicates).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.freezing import freeze
from tests.gateway.conftest import Served, options_of

pytestmark = pytest.mark.real

CREATES: list[tuple[str, dict[str, Any]]] = [
    ("/api/v1/environments", {"trajectory": "t"}),
    ("/v2/sandboxes", {"templateID": "base", "timeout": 60}),
]


def opens_of(served: Served, job: str) -> int:
    """Return how many environments a job has ever had, as the journal knows."""
    return int(served.live.rows(f"SELECT count(*) FROM environments WHERE job = '{job}'")[0][0])


def begun(served: Served, path: str, body: dict[str, Any], headers: dict[str, str]) -> socket.socket:
    """Return a connection on which a create was sent."""
    request = httpx.Request("POST", f"{served.url}{path}", json=body, headers=headers)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items()), "", ""]
    connection = socket.create_connection((request.url.host, request.url.port or 80))
    connection.sendall("\r\n".join(lines).encode() + request.content)
    return connection


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Stop a process, and have it go on afterwards."""
    freeze(process.pid)
    try:
        yield
    finally:
        process.resume()


def cut(connection: socket.socket) -> None:
    """Reset a connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize(
    ("path", "body", "id_key"), [(*create, id_key) for create, id_key in zip(CREATES, ("id", "sandboxID"), strict=True)]
)
def test_a_create_whose_answer_was_cut_gives_the_same_sandbox_when_it_is_sent_again(
    served: Served, path: str, body: dict[str, Any], id_key: str
) -> None:
    # Given a create whose connection is cut before the answer, once the system has begun to carry it out
    job = f"cut-{path.strip('/').replace('/', '-')}"
    headers = {"X-API-Key": served.token(job), "Idempotency-Key": "create-1"}
    with begun(served, path, body, headers):
        served.live.until(lambda: served.live.rows(f"SELECT id FROM actions WHERE kind = 'cpu.open' AND job = '{job}'"))
    # When it is sent again, twice
    with httpx.Client(timeout=60) as http:
        answers = [http.send(httpx.Request("POST", f"{served.url}{path}", json=body, headers=headers)).json() for _ in range(2)]
    # Then both have the one sandbox that there is
    assert len({answer[id_key] for answer in answers}) == 1
    assert opens_of(served, job) == 1


@pytest.mark.parametrize(("path", "body"), CREATES)
def test_a_create_without_a_key_whose_connection_breaks_as_it_succeeds_leaves_nothing(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    # Given creates that are being carried out
    job = f"broken-{path.strip('/').replace('/', '-')}"
    headers = {"X-API-Key": served.token(job)}
    environments = f"SELECT id FROM environments WHERE job = '{job}' AND ended_at IS NULL"
    gateway, worker = served.live.process("gateway"), served.live.process("cpu-0")
    with ExitStack() as until_cut:
        with frozen(worker):
            creates = [begun(served, path, body, headers) for _ in range(4)]
            served.live.until(lambda: len(served.live.rows(environments)) == len(creates))
            until_cut.enter_context(frozen(gateway))
        # When they succeed while the gateway does not look, and their connections break before it does
        served.live.until(lambda: len(served.live.rows(f"{environments} AND state = 'open'")) == len(creates))
        for one in creates:
            cut(one)
    # Then each of the environments is closed, as nobody knows of it
    served.live.until(lambda: not served.live.rows(environments))


def test_duplicates_are_not_made_by_a_name_that_is_created_again(served: Served) -> None:
    with served.http("named") as http:
        opened = [http.post("/api/v1/environments", json={"name": "task-7"}).json() for _ in range(3)]
        assert len({one["id"] for one in opened}) == 1
        # And after an ambiguous answer it is found by its name
        (found,) = [one for one in http.get("/api/v1/environments").json() if one["name"] == "task-7"]
        assert found["id"] == opened[0]["id"]
    assert opens_of(served, "named") == 1


def test_a_dead_environment_is_a_terminal_error_and_never_a_blank_one(served: Served) -> None:
    e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")
    # Given environments of three shapes, each with work in it
    sandbox = e2b.Sandbox.create(**options_of(served, "work"))
    sandbox.files.write("work", "done")
    with served.http("work") as http:
        path = f"/api/v1/environments/{http.post('/api/v1/environments', json={}).json()['id']}"
        assert http.put(f"{path}/files", params={"path": "work"}, content=b"done").status_code < 300
        assert http.post("/envs/rollout/create_session", json={"startup_timeout": 60}).status_code == 200
        assert http.post("/envs/rollout/run_in_session", json={"action_type": "bash", "command": "touch work"}).status_code == 200
        start = {"image": "any", "memory": "64m", "sandbox_id": "rock"}
        assert http.post("/apis/envs/sandbox/v1/start_async", json=start).json()["status"] == "Success"
        before = opens_of(served, "work")
        ids = {one["name"]: one["id"] for one in http.get("/api/v1/environments").json()}
        # When their node dies, and another worker takes its place
        served.live.process("cpu-0").kill()
        served.live.until(lambda: "cpu-0" in served.live.stack.dead())
        served.live.stack.restart("cpu-0")
        with served.http("after") as other:
            served.live.until(lambda: other.post("/api/v1/environments", json={}).status_code == 201)
        # Then each call says so, again and again, in a way that no trainer takes for an answer of the program
        for _ in range(3):
            native = http.post(f"{path}/exec", json={"command": "cat work"})
            assert (native.status_code, native.json()["error"]["kind"]) == (502, "infra")
            for verb, body in (
                ("run_in_session", {"action_type": "bash", "command": "cat work"}),
                ("execute", {"command": ["cat", "work"]}),
                ("create_session", {"session": "second"}),
            ):
                remote = http.post(f"/envs/rollout/{verb}", json=body)
                assert (remote.status_code, remote.json()["swerexception"]["extra_info"].get("kind")) == (511, "infra"), (verb, remote.text)
            with pytest.raises(e2b.exceptions.SandboxNotRunningException):
                sandbox.commands.run("cat work")
            # And who looks at them, or opens them by their name, learns the same
            for one in (path, f"/api/v1/environments/{ids['rollout']}"):
                looked = http.get(one)
                assert (looked.status_code, looked.json()["error"]["cause"]) == (404, "environment_lost")
                assert looked.json()["error"]["fault"] == "infrastructure"
            named = http.post("/api/v1/environments", json={"name": "rollout"})
            assert (named.status_code, named.json()["error"]["cause"]) == (502, "environment_lost")
            assert http.post("/apis/envs/sandbox/v1/start_async", json=start).json()["result"]["code"] == 5000
        # And nothing was opened in their place
        assert opens_of(served, "work") == before
        # Whoever closes the name begins afresh, knowingly
        assert http.post("/envs/rollout/close", json=None).status_code == 200
        assert http.post("/envs/rollout/create_session", json={"startup_timeout": 60}).status_code == 200
