"""Harbor, unchanged, on stacks: a task solved by its oracle agent, and what a failure becomes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor", reason="Harbor is not installed")

from app.local.stack import StackPlan
from tests.clients.rows import shows
from tests.containers.conftest import need_containers
from tests.containers.images import TASK, TASK_BASE, make_task
from tests.containers.support import alone_as
from tests.live.support import Live, running

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def live(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    need_containers()
    make_task()
    docker = {"TANGRAM_SANDBOX": "docker", "TANGRAM_IMAGE": TASK_BASE, "TANGRAM_IMAGE_PULL": "never"}
    plan = StackPlan(nodes=1, cores=2, memory_mb=2048, api_nodes=0, variables=docker)
    with alone_as("cpu-0"), running(tmp_path_factory.mktemp("harbor"), plan) as started:
        yield started


def run_trial(live: Live, folder: Path, *options: str, task: Path = TASK) -> dict[str, Any]:
    """Run the task by Harbor's command line and return the result of its only trial."""
    environment = {**live.environment, "PYTHONPATH": str(Path.cwd()), "HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    command = [
        *(sys.executable, "-m", "harbor.cli.main", "run", "--path", str(task), "--agent", "oracle", "--jobs-dir", str(folder / "jobs")),
        *("--env", "tangram.integrations.harbor:TangramEnvironment", "--job-name", "job", *options),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    results = list((folder / "jobs" / "job").glob("*/result.json"))
    assert len(results) == 1, done.stdout + done.stderr
    return dict(json.loads(results[0].read_text()))


@shows("harbor", "harbor run --agent oracle --env tangram.integrations.harbor:TangramEnvironment")
def test_the_oracle_solves_a_task_and_no_environment_is_left(live: Live, tmp_path: Path) -> None:
    result = run_trial(live, tmp_path)
    assert result["exception_info"] is None
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    live.until(lambda: live.rows("select count(*) from environments where job = 'harbor' and state = 'open'") == [(0,)])
    assert live.rows("select count(*) from actions where job = 'harbor'")[0][0] > 5


@shows("harbor", "the same with --ek isolation=bubblewrap", "works; for tasks that need no image")
def test_the_oracle_solves_a_task_without_an_image_in_a_process_sandbox(real_component: None, tmp_path: Path) -> None:
    # Given a task whose files need no image, and a stack without containers
    task = shutil.copytree(TASK, tmp_path / "task")
    settings = (task / "task.toml").read_text()
    (task / "task.toml").write_text("".join(line for line in settings.splitlines(True) if "docker_image" not in line))
    script = task / "solution" / "solve.sh"
    script.write_text(script.read_text().replace("sort -n", "printf '12 pears\\n3 apples\\n7 plums\\n' > stock.txt\nsort -n"))
    plan = StackPlan(nodes=1, cores=2, memory_mb=2048, api_nodes=0, variables={"TANGRAM_ISOLATION": "bubblewrap"})
    with running(tmp_path / "stack", plan) as live:
        # When the oracle solves it; then its reward is read from the folders that every environment has
        result = run_trial(live, tmp_path, "--ek", "isolation=bubblewrap", task=task)
    assert result["exception_info"] is None
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}


@shows(
    "harbor",
    "an image that does not let Harbor's folders be made",
    "differs: commands do not run as root, so this is an exception of the trial and no reward",
)
def test_an_image_without_harbors_folders_is_an_exception_without_a_reward(live: Live, tmp_path: Path) -> None:
    result = run_trial(live, tmp_path, "--ek", f"image={TASK_BASE}")
    assert result["exception_info"]["exception_type"] == "ImageUnfit" and "mkdir -m 777" in result["exception_info"]["exception_message"]
    assert result["verifier_result"] is None
    live.until(lambda: live.rows("select count(*) from environments where job = 'harbor' and state = 'open'") == [(0,)])
