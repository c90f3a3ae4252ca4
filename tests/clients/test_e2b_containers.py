"""Programs that use E2B's client, against a gateway whose nodes have containers: the E2B environments of Harbor and of verifiers."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Served, left_open
from tests.clients.rows import shows
from tests.containers.conftest import need_containers
from tests.containers.images import TASK, TASK_BASE, TASK_IMAGE, make_task
from tests.containers.support import alone_as
from tests.gateway.conftest import serving

HARBOR, VERIFIERS = (importlib.util.find_spec(name) is not None for name in ("harbor", "verifiers"))
pytestmark = [pytest.mark.real, pytest.mark.skipif(not HARBOR and not VERIFIERS, reason="neither Harbor nor verifiers is installed")]


@pytest.fixture(scope="module")
def served(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a stack with containers and a gateway."""
    need_containers()
    make_task()
    docker = {"TANGRAM_SANDBOX": "docker", "TANGRAM_IMAGE": TASK_BASE, "TANGRAM_IMAGE_PULL": "never"}
    with alone_as("cpu-0"), serving(tmp_path_factory.mktemp("containers"), memory_mb=2048, variables=docker) as served:
        yield served


def run_trial(folder: Path, *options: str) -> dict[str, Any]:
    """Run the task, which says its folder, in Harbor's own E2B environment, and return the result of its only trial."""
    task = shutil.copytree(TASK, folder / "task")
    with (task / "task.toml").open("a") as settings:
        settings.write('workdir = "/app"\n')
    command = [
        *(sys.executable, "-m", "harbor.cli.main", "run", "--path", str(task), "--agent", "oracle", "--env", "e2b", *options),
        *("--jobs-dir", str(folder / "jobs"), "--job-name", "job"),
    ]
    done = subprocess.run(command, env={**os.environ, "HOME": str(folder)}, capture_output=True, text=True, timeout=250)
    results = list((folder / "jobs" / "job").glob("*/result.json"))
    assert len(results) == 1, done.stdout + done.stderr
    return dict(json.loads(results[0].read_text()))


@shows(
    "harbor",
    "harbor run --agent oracle --env e2b (its own) --ek prebuilt_template_id=IMAGE --ek restore_login_path=false",
    "differs: images are not built, and commands not run as root; a task says its `workdir`",
)
@pytest.mark.skipif(not HARBOR, reason="Harbor is not installed")
def test_harbors_own_e2b_environment_has_a_task_solved_by_its_oracle(served: Served, e2b_environment: str, tmp_path: Path) -> None:
    result = run_trial(tmp_path, "--ek", f"prebuilt_template_id={TASK_IMAGE}", "--ek", "restore_login_path=false")
    assert result["exception_info"] is None
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    served.live.until(lambda: left_open(served, e2b_environment) == 0)


@shows("harbor", "the same without prebuilt_template_id", "refused: it builds with steps; an exception of the trial and no reward")
@pytest.mark.skipif(not HARBOR, reason="Harbor is not installed")
def test_what_harbor_would_build_is_an_exception_that_says_what_to_name(served: Served, e2b_environment: str, tmp_path: Path) -> None:
    result = run_trial(tmp_path)
    assert "build an image that has them, and name that" in result["exception_info"]["exception_message"]
    assert result["verifier_result"] is None


@shows("verifiers", "E2BRuntime.run_program (containers)")
@pytest.mark.skipif(not VERIFIERS, reason="verifiers is not installed")
async def test_the_main_program_of_a_rollout_runs_once_to_its_end(
    served: Served, e2b_environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verifiers.v1.runtimes import E2BConfig, provision_runtime

    monkeypatch.setattr("verifiers.v1.runtimes.e2b._TEMPLATE_LOCK_DIR", tmp_path)
    async with provision_runtime(E2BConfig(image=TASK_IMAGE, workdir="/tmp/app", memory=0.25, creates_per_sec=None)) as runtime:
        done = await runtime.run_program(["sh", "-c", "echo ran >> ledger; echo out; echo err >&2; exit 3"], {})
        assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")
        assert await runtime.read("/tmp/app/ledger") == b"ran\n"
