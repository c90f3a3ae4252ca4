"""A full or long queue, as each kind of caller survives it: some come again, some are held, nobody gets a verdict on a program."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import Served, options_of
from tests.gateway.shapes import ROCK

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

pytestmark = pytest.mark.real

RUN_S, PATIENCE_S = 14, 1
LEASE_S = RUN_S + PATIENCE_S
"""What the lease of the call's environment is where nothing is added to the limits of the call."""

GATEWAY = """
import sys
from app.gateway import run_code
from tangram.__main__ import main
run_code.ABANDONED_S = run_code.MARGIN_S = 0
sys.argv[:1] = ["tangram", "gateway"]
main()
"""
"""A gateway whose leases end so soon that a test can wait for it."""


def test_a_full_queue_is_said_to_those_who_come_again_and_held_for_those_who_do_not(one_core: Served) -> None:
    live = one_core.live

    def count(status: str) -> int:
        return len(live.rows(f"SELECT id FROM actions WHERE kind = 'cpu.exec' AND status = '{status}'"))

    with one_core.http("full") as http, ThreadPoolExecutor(5) as threads:

        def begin(path: str, **body: object) -> Future[httpx.Response]:
            return threads.submit(http.post, path, json=body, timeout=120)

        # Given a sandbox of E2B, shells of SWE-ReX and a sandbox of ROCK
        options = options_of(one_core, "full")
        sandbox = e2b.Sandbox.create(**options)
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
        with pytest.raises(e2b.TimeoutException):  # the time limit of a command of E2B includes its wait
            sandbox.commands.run("touch ran", timeout=1)
        live.until(lambda: count("waiting") == 0)
        waits = begin(exec_path, command="echo waited", session="other")
        live.until(lambda: count("waiting") == 1)
        # Then callers of the native shape are told when to come again
        refused = http.post(exec_path, json={"command": "true", "session": "third"})
        assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "overload") and int(refused.headers["Retry-After"]) > 0
        with pytest.raises(e2b.RateLimitException):
            sandbox.commands.run("true")
        refused = http.post("/v2/sandboxes", json={"templateID": "base"})
        assert (refused.status_code, refused.json()["code"]) == (503, 503) and int(refused.headers["Retry-After"]) > 0
        # And those of /run_code get what they try again
        assert http.post("/run_code", json={"language": "bash", "code": "true"}).status_code == 504
        # And those who never call twice are held
        rejected = count("rejected")
        held = [
            begin("/envs/full/run_in_session", action_type="bash", command="echo held"),
            begin(f"{ROCK}/execute", sandbox_id=begun, command=["echo", "held"]),
        ]
        live.until(lambda: count("rejected") >= rejected + 2)
        # And a create that E2B's client sends again
        creating = threads.submit(e2b.Sandbox.create, **options)
        live.until(lambda: live.log("gateway").count("POST /v2/sandboxes 503") >= 2)
        assert not any(one.done() for one in (*held, creating))
        # Until there is room
        (folder / "go").touch()
        assert (holds.result().json()["exit_code"], waits.result().json()["stdout"]) == (0, "waited\n")
        assert held[0].result().json()["output"].strip() == "held"
        assert held[1].result().json()["result"]["stdout"] == "held\n"
        creating.result().kill()
        assert not sandbox.files.exists("ran") and sandbox.kill()


def test_the_lease_of_a_call_is_renewed_for_as_long_as_it_goes_on(one_core: Served, tmp_path: Path) -> None:
    live = one_core.live
    hasty = one_core.beside("-c", GATEWAY, TANGRAM_GATEWAY_PATIENCE_S=str(PATIENCE_S))
    with hasty as gateway, gateway.http("waits") as http, ThreadPoolExecutor(1) as threads:
        # Given a call whose lease is no longer than it may take
        body = {"language": "bash", "code": f"until [ -e {tmp_path}/go ]; do sleep 0.1; done", "run_timeout": RUN_S}
        answer = threads.submit(http.post, "/run_code", json=body)
        lease_s = "SELECT ends_at - opened_at FROM environments WHERE job = 'waits' AND opened_at IS NOT NULL"
        live.until(lambda: live.rows(lease_s))
        assert live.rows(lease_s) == [(pytest.approx(LEASE_S, abs=1.0),)]
        # Then it is made longer meanwhile, so that no wait in the queue ends it
        live.until(lambda: live.rows(lease_s)[0][0] > LEASE_S + 1)
        (tmp_path / "go").touch()
        assert answer.result().json()["status"] == "Success"
