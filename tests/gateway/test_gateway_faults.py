"""An infrastructure failure is never scored 0: in every shape, the end of an action whose node dies is told apart from a wrong program.

Nodes are killed while commands run, while others wait for a core, and while scores are asked for; engines fail.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli.reporting import read_report
from app.cli.state import read_state
from app.local.processes import Command
from app.local.stack import StackPlan
from tangram import ActionError, Client, EnvironmentLost
from tangram.calls import Place
from tangram.integrations.verl_reward import KEPT, ScoreFailed, compute_score
from tests.freezing import freeze
from tests.gateway.conftest import Served, options_of
from tests.gateway.test_gateway_rock import VERBS, Sandbox
from tests.live.support import FAST_BEATS, Live, running
from tests.ports import free_port

WRONG = "exit 3"
SLOW = "sleep 600"

SERVICES = """
[services.judge]
engine = "stub"
task = "score"
cells = [1]
memory_mb = 100
max_concurrency = 8

[services.teacher]
engine = "stub"
task = "logprobs"
cells = [1]
memory_mb = 100
"""
BROKEN = """
[services.broken-judge]
engine = "torch"
task = "score"
model = "broken"
cells = [1]
memory_mb = 200

[services.broken-teacher]
engine = "torch"
task = "logprobs"
model = "broken"
cells = [1]
memory_mb = 200
"""
"""Services whose model cannot be read."""

ITEMS = [{"prompt": "p", "response": "r"}]


CORES = 4


@pytest.fixture(scope="module")
def stack_with_nodes_to_lose(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a stack with a gateway."""
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    folder = tmp_path_factory.mktemp("faults")
    (folder / "services.toml").write_text(SERVICES)
    plan = StackPlan(
        policy="fcfs",
        nodes=1,
        cores=CORES,
        memory_mb=16384,
        cells=4,
        cell_memory_mb=1200,
        api_nodes=0,
        services_file=folder / "services.toml",
        gateway_port=free_port(),
        variables=FAST_BEATS,
    )
    with running(folder / "state", plan) as live:
        yield Served(live, plan.gateway_url)


@pytest.fixture
def served(stack_with_nodes_to_lose: Served) -> Served:
    """Return the stack with all its nodes, of which a test may kill any."""
    stack_with_nodes_to_lose.live.repair()
    return stack_with_nodes_to_lose


def metric(served: Served, cause: str) -> dict[str, int]:
    """Return how many failures of the system a cause has in the gateway's metrics, by shape."""
    start = f'tangram_gateway_infra_failed_total{{cause="{cause}",shape="'
    lines = [line.removeprefix(start) for line in httpx.get(f"{served.url}/metrics").text.splitlines() if line.startswith(start)]
    return {line.partition('"')[0]: int(float(line.split()[-1])) for line in lines}


def failures(live: Live) -> Counter[str]:
    """Return how many actions of the stack have failed by the system's fault so far, by cause."""
    return Counter(read_state(live.settings)[0]["infra_failed"])


def raised(future: Future[Any]) -> Any:
    """Return what a call in another thread has raised, None where it has raised nothing."""
    return future.exception(timeout=120)


def test_a_node_that_dies_is_told_from_a_wrong_program_in_every_shape_that_runs_commands(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, before = served.live, failures(served.live)
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
        code = {"language": "bash", "code": WRONG}
        assert http.post("/run_code", json=code).json()["run_result"]["return_code"] == 3
        kept = [verl.open(trajectory=f"v{number}", detached=True).id for number in range(2)]
        places = [asdict(Place(job="verl", trajectory=f"v{number}", environment=name)) for number, name in enumerate(kept)]

        def score(check: str, number: int) -> dict[str, Any]:
            return asyncio.run(compute_score("d", "s", check, {KEPT: places[number]}))

        assert score(WRONG, 0) == {"score": 0.0, "exit_code": 3}
        # And a command that runs, or waits for a core, in each
        sandbox = _of_e2b(served)
        calls: dict[str, Callable[[], Any]] = {"e2b": lambda: sandbox.commands.run(SLOW, timeout=600)} if sandbox else {}
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
        # When the node is killed
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
        through = dict.fromkeys(calls.keys() - {"client", "verl"}, 1)
        assert metric(served, "environment_lost") == through
        assert not (sandbox and sandbox.is_running())
        live.until(lambda: failures(live) - before == {"environment_lost": len(calls)})
        # And so it stays for an environment that is lost; nor can that be kept for longer
        lost = native.rpartition("/")[2]
        assert http.post(rex, json={"command": ["true"]}).json()["swerexception"]["extra_info"]["cause"] == "environment_lost"
        assert not http.get(f"/envs/{lost}/is_alive").json()["is_alive"]
        assert http.post(f"{native}/exec", json={"command": "true"}).status_code == 502
        assert http.post(f"{native}/lease", json={"lease_s": 600}).status_code == 404
        assert http.post(f"/sandboxes/{lost}/timeout", json={"timeout": 600}).status_code == 404
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
    rows = served.live.rows("SELECT status FROM actions WHERE kind IN ('cpu.exec', 'gpu.score', 'gpu.logprobs') AND ended_at IS NULL")
    return Counter(row[0] for row in rows)


def _scores(http: httpx.Client, client: Client, judge: str, teacher: str) -> dict[str, Callable[[], Any]]:
    """Return a call of each shape that gives scores, by shape; what it returns is what a trainer reads of the answer."""

    def post(path: str, body: Any) -> Any:
        answer = http.post(path, json=body)
        if answer.status_code != 200:
            raise Refused(answer)
        found = answer.json()
        return {key: found[key] for key in ("scores", "rewards", "data", "choices") if key in found} if isinstance(found, dict) else found

    completion = {"model": teacher, "prompt": [[1, 2, 3]], "max_tokens": 1, "prompt_logprobs": 0}
    return {
        "client": lambda: list(client.score(judge, ITEMS)),
        "native": lambda: post("/api/v1/score", {"service": judge, "items": ITEMS}),
        "rewards: slime": lambda: post(f"/rm/{judge}", {"prompt": "p", "response": "r"}),
        "rewards: openrlhf": lambda: post(f"/reward/{judge}", {"query": ["p"], "prompts": ["p"], "labels": [""]}),
        "scores: classify": lambda: post("/classify", {"model": judge, "input": "p"}),
        "scores: score": lambda: post("/score", {"model": judge, "text_1": "p", "text_2": "r"}),
        "teachers: completions": lambda: post("/v1/completions", completion),
    }


class Refused(Exception):
    """Raised for an answer that is none."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text)
        self.answer = answer


def test_a_score_whose_node_dies_is_the_same_score_from_another_one(served: Served) -> None:
    live = served.live
    with served.http() as http, live.client("scores") as client, ThreadPoolExecutor(16) as threads:
        # Given the scores of each shape, and the same calls once more on a node that hangs
        calls = _scores(http, client, "judge", "teacher")
        undisturbed = {name: call() for name, call in calls.items()}
        assert all(undisturbed.values())
        freeze(live.process("gpu-0").pid)
        pending = {name: threads.submit(call) for name, call in calls.items()}
        live.until(lambda: live.rows("SELECT count(*) FROM actions WHERE kind LIKE 'gpu.%' AND ended_at IS NULL") == [(len(calls),)])
        assert not any(future.done() for future in pending.values())
        # When the node dies, and another one comes
        live.process("gpu-0").kill()
        live.until(lambda: live.rows("SELECT state FROM nodes WHERE name = 'gpu-0'") == [("lost",)])
        live.stack.restart("gpu-0")
        # Then everybody has the score that the model gives
        assert {name: future.result(timeout=120) for name, future in pending.items()} == undisturbed
        assert live.rows("SELECT DISTINCT attempts FROM actions WHERE kind LIKE 'gpu.%' ORDER BY attempts")[-1] == (2,)


@pytest.fixture
def broken(served: Served, tmp_path: Path) -> None:
    """Start one more GPU node, whose services are broken. Only this one imports torch."""
    if find_spec("torch") is None:
        pytest.skip("the extra `gpu` is not installed")
    model = tmp_path / "broken"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"no tensors")
    (tmp_path / "services.toml").write_text(BROKEN)
    live, worker = served.live, served.live.command("gpu-0")
    own = {"TANGRAM_NODE_NAME": "gpu-broken", "TANGRAM_SERVICES_FILE": str(tmp_path / "services.toml")}
    live.stack.spawn(Command("gpu-broken", worker.argv, {**worker.env, **own}))
    live.until(lambda: live.rows("SELECT state FROM nodes WHERE name = 'gpu-broken'") == [("up",)])


@pytest.mark.usefixtures("broken")
def test_an_engine_that_fails_gives_no_score_in_any_shape(served: Served) -> None:
    live, before = served.live, failures(served.live)
    with served.http() as http, live.client("scores") as client:
        shapes: Counter[str] = Counter()
        for name, call in _scores(http, client, "broken-judge", "broken-teacher").items():
            # When a score is asked for, then there is none
            with pytest.raises((ActionError, Refused)) as caught:
                call()
            # And it is told whose fault that is
            if isinstance(caught.value, ActionError):
                assert (caught.value.cause, caught.value.fault) == ("engine_failed", "infrastructure")
                continue
            answer = caught.value.answer
            assert (answer.status_code, set(answer.json())) == (502, {"error"}), name
            said = answer.json()["error"]
            assert "infra" in (said.get("type"), said.get("kind")), name
            shapes[name.partition(":")[0]] += 1
        # And the metric and the status count it
        assert metric(served, "engine_failed") == dict(shapes)
        live.until(lambda: failures(live) - before == {"engine_failed": 1 + shapes.total()})
