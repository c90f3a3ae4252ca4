"""NeMo Gym's sandbox API, unchanged, over our provider."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nemo_gym.sandbox", reason="NeMo Gym is not installed")


from nemo_gym.sandbox import Sandbox, SandboxSpec
from nemo_gym.sandbox.providers import SandboxCreateError, SandboxStatus
from nemo_gym.sandbox.providers.registry import register_provider

from tangram import ActionCancelled, ActionFailed, AsyncClient, Client
from tangram.integrations.nemo_gym import TangramProvider
from tangram.integrations.sandbox import Sandbox as Opened
from tests.clients.rows import shows
from tests.integrations.conftest import standing
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("live")]
_FOUND = """
from nemo_gym.sandbox.providers.registry import get_provider_class
found = get_provider_class("tangram")
print(found.__module__, found.__name__)
"""
register_provider("tangram", TangramProvider, override=True)


@shows("nemo-gym", "sandbox provider `tangram` by its entry point")
def test_its_registry_finds_the_provider_by_the_installed_entry_point() -> None:
    done = subprocess.run([sys.executable, "-c", _FOUND], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["tangram.integrations.nemo_gym TangramProvider"], done.stderr


@shows("nemo-gym", "Sandbox.start, exec, upload, download, status, stop")
def test_a_sandbox_runs_commands_moves_files_and_leaves_nothing(live: Live, tmp_path: Path) -> None:
    before = standing(live)
    spec = SandboxSpec(workdir="work", env={"A": "1"}, files={"work/given.txt": "given"}, resources={"cpu": 2, "memory_mib": 128})
    sandbox = Sandbox({"tangram": {"job": "nemo"}}).start(spec)
    done = sandbox.exec("cat given.txt; echo $A$B; echo bad >&2; exit 3", env={"B": "2"}, user="root")
    assert (done.stdout, done.stderr, done.return_code, done.error_type) == ("given12\n", "bad\n", 3, None)
    (tmp_path / "up").write_bytes(bytes(range(256)) * 5000)
    sandbox.upload(tmp_path / "up", "deep/down")
    sandbox.download("deep/down", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "up").read_bytes()
    assert sandbox.status() == SandboxStatus.RUNNING
    sandbox.stop()
    live.until(lambda: set(standing(live)) <= set(before))


@shows("nemo-gym", "Sandbox.exec (timeout_s)")
def test_out_of_time_is_a_result_that_says_so() -> None:
    sandbox = Sandbox({"tangram": {}}).start(SandboxSpec())
    done = sandbox.exec("echo early; sleep 60", timeout_s=6)
    sandbox.stop()
    assert (done.stdout, done.return_code, done.error_type) == ("early\n", 125, "timeout")


@shows("nemo-gym", "a sandbox that is gone", "differs: exec raises, so that no agent takes an exit code for the program's")
def test_a_sandbox_that_is_gone_raises_and_says_that_it_stopped(live: Live) -> None:
    sandbox = Sandbox({"tangram": {"job": "nemo"}}).start(SandboxSpec(metadata={"instance_id": "gone"}))
    with Client("nemo") as other:
        other.cancel(trajectory="gone")
    with pytest.raises((ActionCancelled, ActionFailed)):
        sandbox.exec("true")
    live.until(lambda: sandbox.status() == SandboxStatus.STOPPED)
    sandbox.stop()


@shows("nemo-gym", "SandboxSpec.ttl_s")
def test_a_sandbox_ends_when_its_time_to_live_is_over(live: Live) -> None:
    sandbox = Sandbox({"tangram": {}}).start(SandboxSpec(ttl_s=0.5))
    live.until(lambda: sandbox.status() == SandboxStatus.STOPPED)


async def test_a_create_that_is_cancelled_leaves_no_environment(live: Live) -> None:
    stands = "SELECT id FROM environments WHERE job = 'cancelled' AND state = 'open'"
    provider = TangramProvider(job="cancelled")
    async with AsyncClient("busy") as other:
        # Given a create whose work folder waits for a core
        busy = await Opened.open(other, trajectory="t")
        holding = asyncio.create_task(busy.exec("until [ -e go ]; do sleep 0.05; done", units=(2,)))
        await asyncio.to_thread(live.until, lambda: live.rows("SELECT 1 FROM actions WHERE job = 'busy' AND status = 'running'"))
        creating = asyncio.create_task(provider.create(SandboxSpec(workdir="work")))
        waiting = "SELECT 1 FROM actions WHERE job = 'cancelled' AND kind = 'cpu.exec' AND status = 'waiting'"
        await asyncio.to_thread(live.until, lambda: live.rows(waiting))
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        await asyncio.to_thread(live.until, lambda: not live.rows(stands))
        holding.cancel()
    await provider.aclose()


@shows("nemo-gym", "SandboxSpec: GPUs, entrypoint, user", "not served: SandboxCreateError")
def test_what_cannot_be_had_is_refused() -> None:
    for spec in (SandboxSpec(resources={"gpu": 1}), SandboxSpec(workdir="/proc/nowhere"), SandboxSpec(resources={"memory_mib": 10**9})):
        with pytest.raises(SandboxCreateError):
            Sandbox({"tangram": {}}).start(spec)
    with pytest.raises(SandboxCreateError, match="isolation:container"):
        Sandbox({"tangram": {"image_needed": True}}).start(SandboxSpec(image="python:3.12"))
