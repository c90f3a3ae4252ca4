"""An infrastructure failure is never scored 0: in every shape, the end of an action whose node dies is told apart from a wrong program.

A node is killed while commands run, and while others wait for a core. Engines fail in `test_gateway_scores.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import pytest

from app.cli.reporting import read_report
from tangram import EnvironmentLost
from tangram.calls import Place, execute
from tangram.integrations.verl_reward import KEPT, ScoreFailed, compute_score
from tests.gateway.conftest import Served, options_of
from tests.gateway.test_gateway_rock import VERBS, Sandbox

pytestmark = pytest.mark.real

WRONG = "exit 3"
SLOW = "sleep 600"

CORES = 5


def raised(future: Future[Any]) -> Any:
    """Return what a call in another thread has raised, None where it has raised nothing."""
    return future.exception(timeout=120)


def test_a_node_that_dies_is_told_from_a_wrong_program_in_every_shape_that_runs_commands(
    pair: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, _ = pair
    live, before = served.live, served.failures()
    for name, text in live.environment.items():
        monkeypatch.setenv(name, text)
    with served.http() as http, live.client("native") as client, live.client("verl") as verl, ThreadPoolExecutor(16) as threads:
        # Given an environment in each shape, in which a wrong program has an end that says so
        mine = client.open(trajectory="t")
        wrong = mine.exec(WRONG)
        assert (wrong.status, wrong.exit_code, wrong.cause, wrong.fault) == ("succeeded", 3, "exit", "program")
        native = f"/api/v1/environments/{http.post('/api/v1/environments', json={}).json()['id']}"
        answer = http.post(f"{native}/exec", json={"command": WRONG}).json()
        assert (answer["exit_code"], answer["cause"], answer["fault"]) == (3, "exit", "program")
        rex = f"/envs/{native.rpartition('/')[2]}/execute"
        assert http.post(rex, json={"command": WRONG, "shell": True}).json()["exit_code"] == 3
        http.headers["XRL-Authorization"] = f"Bearer {http.headers['X-API-Key']}"
        rock = Sandbox(http)
        live.until(lambda: rock.status()["result"]["is_alive"])
        start = {"image": "any", "memory": "64m", "sandbox_id": "named-rock"}
        assert http.post(f"{VERBS}/start_async", json=start).json()["status"] == "Success"
        assert http.post("/envs/named/create_session", json={"startup_timeout": 60}).status_code == 200
        (named,) = (one["id"] for one in http.get("/api/v1/environments").json() if one["name"] == "named")
        code = {"language": "bash", "code": WRONG}
        assert http.post("/run_code", json=code).json()["run_result"]["return_code"] == 3
        kept = [verl.open(trajectory=f"v{number}", detached=True).id for number in range(2)]
        places = [asdict(Place(job="verl", trajectory=f"v{number}", environment=name)) for number, name in enumerate(kept)]

        def score(check: str, number: int) -> dict[str, Any]:
            return asyncio.run(compute_score("d", "s", check, {KEPT: places[number]}))

        assert score(WRONG, 0) == {"score": 0.0, "exit_code": 3}
        # And a command that runs, or waits for a core, in each
        sandbox = _of_e2b(served)
        calls: dict[str, Callable[[], Any]] = {
            "verl, fresh": lambda: asyncio.run(compute_score("d", "s", "until [ -e ~/go ]; do sleep 0.05; done", job="fresh"))
        }
        if sandbox:
            calls["e2b"] = lambda: sandbox.commands.run(SLOW, timeout=600)
        calls |= {
            "client": lambda: mine.exec(SLOW),
            "native": lambda: http.post(f"{native}/exec", json={"command": SLOW, "session": "slow"}),
            "run_code": lambda: http.post("/run_code", json={"language": "bash", "code": SLOW, "run_timeout": 600}),
            "swerex": lambda: http.post(rex, json={"command": SLOW, "shell": True}),
            "rock": lambda: http.post(f"{VERBS}/execute", json={"command": SLOW, "shell": True, "sandbox_id": rock.id, "timeout": 600}),
            "verl": lambda: score(SLOW, 1),
        }
        pending: dict[str, Future[Any]] = {}
        for name, call in calls.items():
            pending[name] = threads.submit(call)
            live.until(lambda: _unfinished(served).total() == len(pending))
        live.until(lambda: _unfinished(served) == {"running": CORES, "waiting": len(calls) - CORES})
        live.until(lambda: not live.rows("SELECT id FROM environments WHERE state IN ('waiting', 'opening')"))
        live.process("cpu-0").kill()
        # Then each end is one of the infrastructure, and none is a result of the program
        error = raised(pending["client"])
        assert (type(error), error.cause, error.fault) == (EnvironmentLost, "environment_lost", "infrastructure")
        failed = pending["native"].result()
        assert failed.status_code == 502
        assert {"kind": "infra", "cause": "environment_lost", "fault": "infrastructure"}.items() <= failed.json()["error"].items()
        remote = pending["swerex"].result()
        assert (remote.status_code, remote.json()["swerexception"]["class_path"]) == (511, "swerex.exceptions.SwerexException")
        assert remote.json()["swerexception"]["extra_info"]["fault"] == "infrastructure"
        envelope = pending["rock"].result().json()
        assert (envelope["status"], envelope["result"]["exit_code"]) == ("Failed", None)
        assert envelope["result"]["code"] != 6000  # the command's own failure
        assert pending["run_code"].result().status_code == 504
        assert isinstance(raised(pending["verl"]), ScoreFailed)
        if sandbox:
            assert type(raised(pending["e2b"])).__name__ == "SandboxNotRunningException"
        # And the gateway's metric, the status and the report count them as failures of ours
        through = dict.fromkeys(calls.keys() - {"client", "verl", "verl, fresh"}, 1)
        assert served.infra_failed("environment_lost") == through
        assert not (sandbox and sandbox.is_running())
        live.until(lambda: served.failures() - before == {"environment_lost": len(calls)})
        # And so it stays for an environment that is lost; nor can that be kept for longer
        lost = native.rpartition("/")[2]
        assert http.post(rex, json={"command": ["true"]}).json()["swerexception"]["extra_info"]["cause"] == "environment_lost"
        assert not http.get(f"/envs/{lost}/is_alive").json()["is_alive"]
        assert http.post(f"{native}/exec", json={"command": "true"}).status_code == 502
        assert http.post(f"{native}/lease", json={"lease_s": 600}).status_code == 404
        assert http.post(f"/sandboxes/{lost}/timeout", json={"timeout": 600}).status_code == 404
        # And who looks at one, or opens it by its name, learns the same each time: there is never a blank one in its place
        for _ in range(2):
            for one in (native, f"/api/v1/environments/{named}"):
                looked = http.get(one)
                assert (looked.status_code, looked.json()["error"]["cause"]) == (404, "environment_lost")
                assert looked.json()["error"]["fault"] == "infrastructure"
            again = http.post("/api/v1/environments", json={"name": "named"})
            assert (again.status_code, again.json()["error"]["cause"]) == (502, "environment_lost")
            for verb, body in (("run_in_session", {"action_type": "bash", "command": "true"}), ("create_session", {"session": "second"})):
                remote = http.post(f"/envs/named/{verb}", json=body)
                assert (remote.status_code, remote.json()["swerexception"]["extra_info"].get("kind")) == (511, "infra"), (verb, remote.text)
            assert http.post(f"{VERBS}/start_async", json=start).json()["result"]["code"] == 5000
        # Once there is a node again, whoever closes the name begins afresh, and a score that can be had from another environment is had
        live.repair()
        assert http.post("/envs/named/close", json=None).status_code == 200
        assert http.post("/envs/named/create_session", json={"startup_timeout": 60}).status_code == 200
        standing = "SELECT trajectory, id FROM environments WHERE job = 'fresh' AND state = 'open'"
        live.until(lambda: live.rows(standing))
        place = Place("fresh", *live.rows(standing)[0])
        assert client.submit(execute(place, "touch ~/go", session="other")).result(60).exit_code == 0
        assert pending["verl, fresh"].result(120) == {"score": 1.0, "exit_code": 0}
    report = read_report(live.settings, "native").document()
    assert (report["total"]["by_cause"]["exit"], report["total"]["by_fault"]) == (1, {"infrastructure": 1, "program": 1})


def _of_e2b(served: Served) -> Any:
    """Return a sandbox of E2B's client, None where that is not installed."""
    try:
        import e2b
    except ImportError:
        return None
    sandbox = e2b.Sandbox.create(**options_of(served, "e2b"))
    with pytest.raises(e2b.CommandExitException) as wrong:
        sandbox.commands.run(WRONG)
    assert wrong.value.exit_code == 3
    return sandbox


def _unfinished(served: Served) -> Counter[str]:
    rows = served.live.rows("SELECT status FROM actions WHERE kind = 'cpu.exec' AND ended_at IS NULL")
    return Counter(row[0] for row in rows)
