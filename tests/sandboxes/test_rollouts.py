"""Bundled rollouts, command by command, have the same results in every kind of sandbox.

Those whose actions differ in kind: files written and read beside commands, and files replaced by tools.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.replay.scripts import starting_files
from tests.workers_cpu.support import admit
from workers.cpu.abstract import Environment, EnvironmentSpec

from .conftest import Boxes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHOSEN = ("add-stopwords", "rename-figures")
LINES = (EXAMPLES / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
ROLLOUTS = [line for line in map(json.loads, LINES) if line.get("trajectory") in CHOSEN]


def plain(printed: bytes, home: bytes) -> bytes:
    """Return what a command printed without what differs from run to run: its folder, and how long it took."""
    return re.sub(rb"\b\d+\.\d+ ?s\b", b"<time>", printed.replace(home, b"<home>"))


def carried_out(environment: Environment, rollout: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Carry a rollout's commands and file actions out, one after the other, and return what came of each."""
    if "files" in rollout:
        for path, content in starting_files(EXAMPLES / rollout["files"]):
            environment.write_file(path, content)
    home = admit(environment, 'printf %s "$HOME"').wait().stdout
    results: list[tuple[Any, ...]] = []
    for step in rollout["steps"]:
        for action in step.get("actions") or [step["action"]]:
            if action["kind"] == "cpu.exec":
                outcome = admit(environment, action["command"], cores=(0,), variables={"PYTHONHASHSEED": "0"}).wait()
                assert (outcome.status, outcome.exit_code) == ("succeeded", action.get("exit_code", 0)), (action, outcome)
                results.append(("exec", action["command"], plain(outcome.stdout, home)))
            elif action["kind"] == "cpu.write_file":
                environment.write_file(action["path"], action["text"].encode())
            elif action["kind"] == "cpu.read_file":
                results.append(("read", action["path"], environment.read_file(action["path"])))
    return results


@pytest.mark.parametrize("rollout", ROLLOUTS, ids=[rollout["trajectory"] for rollout in ROLLOUTS])
def test_a_recorded_rollout_has_the_same_results_as_in_processes(boxes: Boxes, env: Environment, rollout: dict[str, Any]) -> None:
    with_processes = boxes("process").open(EnvironmentSpec(id=rollout["trajectory"]))
    assert carried_out(env, rollout) == carried_out(with_processes, rollout)
    with_processes.close()
