"""A live replay whose stack breaks under it says so instead of waiting for results that will never come."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from app.local.processes import wait_until
from tests.cli.template import PROGRAM, Forked

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

TRACE = {
    "schema": "tangram.trace/1",
    "trajectory": "t",
    "steps": [{"think_s": 0, "action": {"kind": "cpu.exec", "work_s": 1, "command": "sleep 300"}}],
}


def test_a_replay_ends_when_its_scheduler_dies(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(TRACE) + "\n", encoding="utf-8")
    state = tmp_path / "state"
    env = {**os.environ, "TANGRAM_STATE_DIR": str(state)}
    words = [*PROGRAM, "replay", str(trace), "--live", "--cores", "1"]
    replay = Forked(words, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    # Given a replay that waits for a long command
    stack = state / "stack.json"
    log = state / "logs" / "scheduler.log"

    def up() -> bool:
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        return "cpu-0 is up" in text and "api-0 is up" in text

    assert wait_until(up, 120)
    # When its scheduler is killed
    os.kill(json.loads(stack.read_text(encoding="utf-8"))["pids"]["scheduler"], signal.SIGKILL)
    # Then it ends with one line
    _, said = replay.communicate(timeout=200)
    assert replay.returncode == 2
    assert "scheduler ended" in said and "Traceback" not in said
    assert not stack.exists()
