"""A call that waits in the queue for longer than the lease of its environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from app.local.processes import Command
from app.local.stack import StackPlan
from tests.gateway.conftest import Served
from tests.live.support import running
from tests.ports import free_port

COMPILE_S, RUN_S, PATIENCE_S = 15, 8, 1
LEASE_S = COMPILE_S + RUN_S + PATIENCE_S
"""What the lease of the call's environment is where nothing is added to the limits of the call."""

HELD_S = 1.25 * LEASE_S
"""How long the only core is held."""

LANGUAGES = """
[slow]
file = "text"
compile = "sleep 6"
run = "cat text"
tool = "cat"
"""

GATEWAY = """
import sys
from app.gateway import run_code
from tangram.__main__ import main
run_code.ABANDONED_S = run_code.MARGIN_S = 0
sys.argv[0] = "tangram"
main()
"""
"""A gateway whose leases end so soon that a test can wait for it."""


@pytest.fixture
def one_core(real_component: None, tmp_path: Path) -> Iterator[Served]:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    (tmp_path / "languages.toml").write_text(LANGUAGES)
    variables = {"TANGRAM_GATEWAY_LANGUAGES": str(tmp_path / "languages.toml"), "TANGRAM_GATEWAY_PATIENCE_S": str(PATIENCE_S)}
    plan = StackPlan(policy="fcfs", nodes=1, cores=1, memory_mb=4096, api_nodes=0)
    port = free_port()
    with running(tmp_path / "state", plan) as live:
        served = Served(live, f"http://127.0.0.1:{port}")
        live.stack.spawn(Command("gateway", (sys.executable, "-c", GATEWAY, "gateway", "--port", str(port)), variables))
        live.until(lambda: _answers(served.url))
        yield served


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_call_that_waits_in_the_queue_does_not_end_by_its_lease(one_core: Served) -> None:
    live = one_core.live
    with one_core.http() as http, ThreadPoolExecutor(2) as threads:
        opened = http.post("/api/v1/environments", json={}).json()["id"]
        # Given a call that is being compiled, and a command that takes the only core then
        body = {"language": "slow", "code": "ran", "run_timeout": RUN_S, "compile_timeout": COMPILE_S}
        first = threads.submit(http.post, "/run_code", json=body)
        live.until(lambda: live.rows("SELECT 1 FROM actions WHERE status = 'running' AND kind = 'cpu.exec'"))
        busy = {"command": f"sleep {HELD_S:g}", "timeout_s": 2 * HELD_S}
        held = threads.submit(http.post, f"/api/v1/environments/{opened}/exec", json=busy, timeout=None)
        live.until(lambda: live.rows("SELECT 1 FROM actions WHERE status = 'waiting' AND kind = 'cpu.exec'"))
        # When the caller has come again until there was an answer
        answer = first.result()
        while answer.status_code == 504:
            answer = http.post("/run_code", json=body)
        # Then the program has waited for its turn in the same environment, whose lease was renewed meanwhile
        assert answer.json()["run_result"]["stdout"] == "ran"
        (kept_s,), *others = live.rows(f"SELECT ends_at - opened_at FROM environments WHERE id != '{opened}'")
        assert not others and kept_s > HELD_S
        assert held.result().status_code == 200
