"""Bundled rollouts, command by command, in containers and in process environments: the same results.

Those whose actions differ in kind: files written and read beside commands, and files replaced by tools. The others do the same to
other modules of the same repository.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.replay.scripts import starting_files
from tests.workers_cpu.support import admit
from workers.cpu.abstract import Environment, EnvironmentSpec
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.process.sandbox import ProcessSandbox

from .conftest import NODE, needed
from .images import make_with_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHOSEN = ("add-stopwords", "rename-figures")
LINES = (EXAMPLES / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
ROLLOUTS = [line for line in map(json.loads, LINES) if line.get("trajectory") in CHOSEN]


@pytest.fixture(scope="module")
def python_image(image: str) -> str:
    """Give the name of an image with python3 and make."""
    needed("" if shutil.which("make") and shutil.which("ldd") else "there is no make, or no ldd")
    return make_with_python()


@pytest.fixture(scope="module")
def containers(python_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerSandbox]:
    """Give a container sandbox with python3 and make."""
    box = ContainerSandbox(tmp_path_factory.mktemp("c") / "box", node=NODE, options=ContainerOptions(image=python_image, pull="never"))
    yield box
    box.close()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSandbox]:
    """Give a process sandbox."""
    box = ProcessSandbox(tmp_path_factory.mktemp("p") / "box")
    yield box
    box.close()


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
                outcome = admit(environment, action["command"], cores=(0,), timeout_s=60.0, variables={"PYTHONHASHSEED": "0"}).wait()
                expected = action.get("exit_code", 0)
                results.append(("exec", action["command"], outcome.status, outcome.exit_code == expected, plain(outcome.stdout, home)))
            elif action["kind"] == "cpu.write_file":
                environment.write_file(action["path"], action["text"].encode())
            elif action["kind"] == "cpu.read_file":
                results.append(("read", action["path"], environment.read_file(action["path"])))
    return results


@pytest.mark.parametrize("rollout", ROLLOUTS, ids=[rollout["trajectory"] for rollout in ROLLOUTS])
def test_a_recorded_rollout_has_the_same_results_in_both(
    containers: ContainerSandbox, processes: ProcessSandbox, rollout: dict[str, Any]
) -> None:
    # Given an environment of each kind
    spec = EnvironmentSpec(id=rollout["trajectory"])
    with_container, with_processes = containers.open(spec), processes.open(spec)
    # When the same recorded rollout is carried out in both
    in_container, in_process = carried_out(with_container, rollout), carried_out(with_processes, rollout)
    with_container.close()
    with_processes.close()
    # Then every command ends as it was recorded, and prints the same
    assert in_container == in_process
    assert all(result[2:4] == ("succeeded", True) for result in in_container if result[0] == "exec")
