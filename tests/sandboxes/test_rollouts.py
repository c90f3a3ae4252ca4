"""Bundled rollouts, command by command, have the same results in containers as in processes, where other programs carry them out.

Those whose actions differ in kind: files written and read beside commands, and files replaced by tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.replay.scripts import starting_files
from tests.workers_cpu.support import admit
from workers.cpu.abstract import Environment, EnvironmentSpec

from .conftest import Boxes, params

pytestmark = pytest.mark.real

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


@pytest.fixture(scope="module")
def results(boxes: Boxes) -> Callable[[str, int], list[tuple[Any, ...]]]:
    """Return what gives the results of a rollout in a kind of sandbox."""

    @cache
    def carry_out(place: str, number: int) -> list[tuple[Any, ...]]:
        with closing(boxes(place).open(EnvironmentSpec(id=f"rollout-{number}"))) as environment:
            return carried_out(environment, ROLLOUTS[number])

    return carry_out


@pytest.mark.parametrize("number", range(len(ROLLOUTS)), ids=[rollout["trajectory"] for rollout in ROLLOUTS])
@pytest.mark.parametrize("place", params("container"))
def test_a_recorded_rollout_has_the_same_results_as_in_processes(
    results: Callable[[str, int], list[tuple[Any, ...]]], place: str, number: int
) -> None:
    assert results(place, number) == results("process", number)
