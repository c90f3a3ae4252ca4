"""Programs that use E2B's client, against a gateway whose nodes have containers: the E2B environments of Harbor and of verifiers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


@shows("harbor", "harbor run --agent oracle --env e2b (its own environment)")
@pytest.mark.skipif(not HARBOR, reason="Harbor is not installed")
def test_harbors_own_e2b_environment_has_a_task_solved_by_its_oracle(
    served: Served, e2b_environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    command = [
        *(sys.executable, "-m", "harbor.cli.main", "run", "--path", str(TASK), "--agent", "oracle", "--env", "e2b"),
        *("--jobs-dir", str(tmp_path / "jobs"), "--job-name", "job"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    (written,) = (tmp_path / "jobs" / "job").glob("*/result.json")
    result = json.loads(written.read_text())
    assert result["exception_info"] is None, done.stdout + done.stderr + json.dumps(result["exception_info"])
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    served.live.until(lambda: left_open(served, e2b_environment) == 0)


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
