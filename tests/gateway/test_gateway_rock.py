"""ROCK's wire against a whole stack, by requests as `rl-rock` 1.11.0 sends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.rows import shows
from tests.gateway.conftest import Served

pytestmark = pytest.mark.real

VERBS = "/apis/envs/sandbox/v1"

_UNSET = ("num_gpus", "accelerator_type", "registry_username", "registry_password", "limit_cpus", "sandbox_id")
START = {
    **{"image": "python:3.11", "image_os": "linux", "memory": "256m", "cpus": 2, "disk": "50G", "use_kata_runtime": False},
    **{"auto_clear_time": 5, "auto_clear_time_minutes": 5, "startup_timeout": 180},
    **dict.fromkeys((*_UNSET, "auto_archive_seconds", "auto_delete_seconds")),
}
"""What `Sandbox.start` sends."""

SESSION = {"session_type": "bash", "session": "s", "startup_source": [], "env_enable": False, "env": None, "remote_user": None}
"""What `create_session` sends."""


class Sandbox:
    """One sandbox, and calls to it as the client makes them."""

    def __init__(self, http: httpx.Client, **start: Any) -> None:
        self.http = http
        self.started = self.verb("start_async", {**START, **start})
        self.id = self.started["result"]["sandbox_id"]

    def verb(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(f"{VERBS}/{name}", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def call(self, name: str, **body: Any) -> dict[str, Any]:
        return self.verb(name, {**body, "sandbox_id": self.id})

    def run(self, command: str, **options: Any) -> dict[str, Any]:
        body = {"action_type": "bash", "session": "s", "command": command, "check": "raise", "timeout": None}
        return self.call("run_in_session", **{**body, **options})

    def execute(self, command: str | list[str], **options: Any) -> dict[str, Any]:
        return self.call("execute", **{"command": command, "timeout": 1200, "cwd": None, "env": None, **options})

    def status(self) -> dict[str, Any]:
        query = {"sandbox_id": self.id, "include_all_states": "False"}
        return dict(self.http.get(f"{VERBS}/get_status", params=query).json())


@pytest.fixture(scope="module")
def rock(served: Served) -> Iterator[httpx.Client]:
    """Return a caller with the headers of the client."""
    headers = {"X-Cluster": "c", "XRL-Authorization": f"Bearer {served.token('rock')}", "X-User-Id": "me"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=180) as client:
        yield client


@pytest.fixture(scope="module")
def sandbox(rock: httpx.Client) -> Iterator[Sandbox]:
    """Return a sandbox with the session `s`."""
    made = Sandbox(rock)
    assert made.call("create_session", **SESSION)["result"]["session_type"] == "bash"
    yield made
    assert made.call("stop")["status"] == "Success"


@shows("rl-rock", "start", "works (start_async, get_status); memory is booked; sandboxes have no GPUs; kata and disk are not used")
@shows("rl-rock", "is_alive, get_status", "works; a sandbox that is gone is a failure")
def test_a_sandbox_that_was_started_stands_and_says_what_it_is(sandbox: Sandbox) -> None:
    assert sandbox.started["status"] == "Success"
    status = sandbox.status()["result"]
    wanted = {"sandbox_id": sandbox.id, "is_alive": True, "state": "running", "image": "python:3.11", "cpus": 2.0, "user_id": "me"}
    assert {name: status[name] for name in wanted} == wanted
    assert {stage["status"] for stage in status["status"].values()} == {"success"}


def test_a_sandbox_is_started_once_by_its_id(sandbox: Sandbox) -> None:
    again = Sandbox(sandbox.http, sandbox_id=sandbox.id)
    sandbox.run("echo kept > kept")
    assert again.id == sandbox.id and again.execute(["cat", "kept"])["result"]["stdout"] == "kept\n"


@shows("rl-rock", "create_session", "works; remote_user is refused")
@shows("rl-rock", "arun", "works, also with nohup; the client takes any failure of its `kill -0` for the process's end")
@shows("rl-rock", "execute")
def test_commands_run_in_a_session_and_beside(sandbox: Sandbox) -> None:
    sandbox.run("export WORD=kept")
    assert sandbox.run("echo $WORD")["result"] == {
        "output": "kept\n", "exit_code": 0, "failure_reason": "", "expect_string": "SHELLPS1PREFIX", "session_type": "bash",
    }  # fmt: skip
    assert sandbox.execute(["sh", "-c", "echo o; echo e >&2; exit 3"])["result"] == {"stdout": "o\n", "stderr": "e\n", "exit_code": 3}
    # As `arun` begins a command in the background, and then looks whether it runs
    begun = sandbox.run("nohup sleep 60 < /dev/null > out 2>&1 & echo PIDSTART${!}PIDEND;disown", timeout=30.0)
    pid = begun["result"]["output"].removeprefix("PIDSTART").strip().removesuffix("PIDEND")
    assert sandbox.run(f"kill -0 {pid}")["status"] == "Success"
    sandbox.run(f"kill -9 {pid}; until ! kill -0 {pid}; do sleep 0.01; done")
    assert sandbox.run(f"kill -0 {pid}")["status"] == "Failed"


@shows("rl-rock", "read_file, write_file, upload", "works; no object store, so uploads are direct")
def test_files_go_in_and_come_out(sandbox: Sandbox) -> None:
    assert sandbox.call("write_file", path="in/a.txt", content="x\n")["result"]["success"]
    assert sandbox.call("read_file", path="in/a.txt", encoding=None, errors=None)["result"] == {"content": "x\n"}
    form = {"target_path": "up.bin", "sandbox_id": sandbox.id}
    answer = sandbox.http.post(f"{VERBS}/upload", data=form, files={"file": ("b", bytes(1000), "application/octet-stream")})
    assert answer.json()["result"] == {"success": True, "message": "", "file_name": "b"}
    assert sandbox.execute(["wc", "-c", "up.bin"])["result"]["stdout"] == "1000 up.bin\n"


@shows("rl-rock", "create_session")
@pytest.mark.parametrize(
    ("code", "verb", "body"),
    [
        (6000, "run_in_session", {"session": "s", "command": "(exit 3)"}),
        (6000, "run_in_session", {"session": "s", "command": "if"}),
        (6000, "run_in_session", {"session": "s", "command": "sleep 60", "timeout": 0.2}),
        (6000, "run_in_session", {"session": "never", "command": "true"}),
        (6000, "execute", {"command": ["sleep", "60"], "timeout": 0.2}),
        (6000, "read_file", {"path": "nowhere"}),
        (4000, "read_file", {}),
        (4000, "create_session", {"session": "other", "remote_user": "nobody"}),
    ],
)
def test_what_fails_is_a_failure_and_no_result(sandbox: Sandbox, code: int, verb: str, body: dict[str, Any]) -> None:
    answer = sandbox.call(verb, **body)
    assert (answer["status"], answer["result"]["code"]) == ("Failed", code)
    assert answer["error"] and answer["error"] == answer["result"]["failure_reason"]
    assert not {"exit_code", "output", "content"} & {name for name, value in answer["result"].items() if value is not None}


@shows("rl-rock", "start")
@pytest.mark.parametrize("start", [{"num_gpus": 1}, {"memory": "much"}, {"image": ""}, {"memory": "900g"}])
def test_a_sandbox_that_can_never_be_is_refused(rock: httpx.Client, start: dict[str, Any]) -> None:
    answer = rock.post(f"{VERBS}/start_async", json={**START, **start}).json()
    assert (answer["status"], answer["result"]["code"]) == ("Failed", 4000)


def test_why_a_start_failed_is_still_known_to_who_asks_later(rock: httpx.Client) -> None:
    rock.post(f"{VERBS}/start_async", json={**START, "memory": "900g", "sandbox_id": "too-large"})
    status = rock.get(f"{VERBS}/get_status", params={"sandbox_id": "too-large"}).json()["result"]
    assert not status["is_alive"] and status["status"]["open"]["status"] == "failed" and status["status"]["open"]["message"]


@shows("rl-rock", "is_alive, get_status")
@shows("rl-rock", "close_session, stop, delete, close")
@pytest.mark.parametrize("last", ["stop", "delete"])  # its `close` calls `stop`
def test_a_sandbox_that_was_stopped_is_gone(served: Served, rock: httpx.Client, last: str) -> None:
    gone = Sandbox(rock)
    assert gone.call("create_session", **SESSION)["status"] == "Success"
    assert gone.call("close_session", session_type="bash", session="s")["status"] == "Success"
    served.live.until(lambda: gone.status()["result"].get("is_alive"))
    assert [gone.call(last)["status"] for _ in range(2)] == ["Success", "Success"]
    assert (gone.status()["status"], gone.execute(["true"])["status"]) == ("Failed", "Failed")


@shows("rl-rock", "restart, archive, commit", "not served: 404")
@pytest.mark.parametrize("path", ["restart", "sandboxes/any/archive", "commit", "commit_async"])
def test_what_rock_has_and_we_have_not_is_not_found(rock: httpx.Client, path: str) -> None:
    assert rock.post(f"{VERBS}/{path}", json={"sandbox_id": "any", "image_tag": "it:1"}).status_code == 404
