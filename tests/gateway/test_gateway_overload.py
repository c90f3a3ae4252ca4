"""A full queue, as each kind of caller survives it: some come again, some are held, nobody gets a verdict on a program."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.gateway.conftest import Served

ROCK = "/apis/envs/sandbox/v1"


def test_a_full_queue_is_said_to_those_who_come_again_and_held_for_those_who_do_not(one_core: Served) -> None:
    live = one_core.live

    def count(status: str) -> int:
        return len(live.rows(f"SELECT id FROM actions WHERE kind = 'cpu.exec' AND status = '{status}'"))

    with one_core.http("full") as http, ThreadPoolExecutor(4) as threads:

        def begin(path: str, **body: object) -> Future[httpx.Response]:
            return threads.submit(http.post, path, json=body, timeout=120)

        # Given shells of SWE-ReX and a sandbox of ROCK
        assert http.post("/envs/full/create_session", json={"startup_timeout": 60}).status_code == 200
        begun = http.post(f"{ROCK}/start_async", json={"image": "python:3.12", "memory": "64m"}).json()["result"]["sandbox_id"]
        alive = f"{ROCK}/get_status?sandbox_id={begun}"
        live.until(lambda: http.get(alive).json()["result"]["is_alive"])
        opened = http.post("/api/v1/environments", json={}).json()["id"]
        exec_path = f"/api/v1/environments/{opened}/exec"
        # And one core with a command on it, and a queue with another one, which fills it
        folder = Path(http.post(exec_path, json={"command": "pwd"}).json()["stdout"].strip())
        holds = begin(exec_path, command="touch begun; until [ -e go ]; do sleep 0.05; done")
        live.until((folder / "begun").exists)
        waits = begin(exec_path, command="echo waited", session="other")
        live.until(lambda: count("waiting") == 1)
        # Then callers of the native shape are told when to come again
        refused = http.post(exec_path, json={"command": "true", "session": "third"})
        assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "overload") and int(refused.headers["Retry-After"]) > 0
        # And those of /run_code get what they try again
        assert http.post("/run_code", json={"language": "bash", "code": "true"}).status_code == 504
        # And those who never call twice are held
        rejected = count("rejected")
        held = [
            begin("/envs/full/run_in_session", action_type="bash", command="echo held"),
            begin(f"{ROCK}/execute", sandbox_id=begun, command=["echo", "held"]),
        ]
        live.until(lambda: count("rejected") >= rejected + 2)
        assert not any(one.done() for one in held)
        # Until there is room
        (folder / "go").touch()
        assert (holds.result().json()["exit_code"], waits.result().json()["stdout"]) == (0, "waited\n")
        assert held[0].result().json()["output"].strip() == "held"
        assert held[1].result().json()["result"]["stdout"] == "held\n"
