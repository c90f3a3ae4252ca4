"""verifiers' own E2B runtime, unchanged, against a gateway: what its environments run their rollouts and their scoring on.

Folders are named from the work folder, which is where process sandboxes let files be; with containers any path does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import E2BConfig, Runtime, provision_runtime

from tests.clients.conftest import Served, left_open
from tests.clients.rows import shows

pytestmark = pytest.mark.real

IMAGE = "python:3.12-slim"


@pytest.fixture
def config(e2b_environment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> E2BConfig:
    monkeypatch.setattr("verifiers.v1.runtimes.e2b._TEMPLATE_LOCK_DIR", tmp_path)
    return E2BConfig(image=IMAGE, workdir="app", cpu=2, memory=0.25, creates_per_sec=None)


@pytest.fixture
async def runtime(config: E2BConfig) -> AsyncIterator[Runtime]:
    async with provision_runtime(config, env={"OF_THE_TASK": "1"}) as made:
        yield made


@shows("verifiers", "E2BRuntime: start, alive, stop")
async def test_it_starts_in_its_template_and_leaves_nothing(served: Served, config: E2BConfig, e2b_environment: str) -> None:
    before = left_open(served, e2b_environment)
    async with provision_runtime(config) as runtime:
        rows = f"SELECT action_class FROM actions WHERE kind = 'cpu.open' AND environment = '{runtime.info.id}'"
        await asyncio.to_thread(served.live.until, lambda: served.live.rows(rows) == [(IMAGE,)])
        assert await runtime.alive()
    await asyncio.to_thread(served.live.until, lambda: left_open(served, e2b_environment) == before)
    assert not await runtime.alive()


@shows("verifiers", "E2BRuntime.run")
async def test_commands_have_their_folder_variables_and_exit_code(runtime: Runtime) -> None:
    done = await runtime.run(["sh", "-c", "basename $PWD; echo $OF_THE_TASK $MORE; echo bad >&2; exit 7"], {"MORE": "2"})
    assert (done.exit_code, done.stdout, done.stderr) == (7, "app\n1 2\n", "bad\n")


@shows("verifiers", "E2BRuntime.read, write")
async def test_files_go_in_and_come_out(runtime: Runtime) -> None:
    data = bytes(range(256))
    await runtime.write("deep/file", data)
    assert await runtime.read("deep/file") == data
    with pytest.raises(SandboxError, match="nowhere"):
        await runtime.read("nowhere")
    with pytest.raises(SandboxError, match="over the 10 byte limit"):
        await runtime.read("deep/file", max_bytes=10)


@shows("verifiers", "E2BRuntime.open_process")
async def test_a_live_process_is_written_to_and_read_from(runtime: Runtime) -> None:
    async with asyncio.timeout(100):
        process = await runtime.open_process(["sh", "-c", "read line; printf 'got %s\\377' $line; read line; echo $line >&2; exit 5"], {})
        await process.write(b"it\n")
        first = b""
        async for chunk in process.stdout:
            first += chunk
            if b"\xff" in first:
                break
        await process.write(b"more\n")
        assert (first, await process.wait()) == (b"got it\xff", 5)
        assert b"".join([chunk async for chunk in process.stderr]) == b"more\n"


@shows("verifiers", "RuntimeProcess.terminate, kill")
@pytest.mark.parametrize(("signal", "code"), [("terminate", 5), ("kill", -1)])
async def test_a_live_process_is_terminated_and_killed(runtime: Runtime, signal: str, code: int) -> None:
    async with asyncio.timeout(100):
        process = await runtime.open_process(["sh", "-c", "trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done"], {})
        async for chunk in process.stdout:
            if b"ready" in chunk:
                break
        await getattr(process, signal)()
        assert await process.wait() == code


@shows("verifiers", "E2BRuntime.run_background")
async def test_a_background_process_goes_on_and_can_be_asked(runtime: Runtime) -> None:
    await runtime.run_background(["sh", "-c", "until [ -e go ]; do sleep 0.05; done; echo gone > went"], {}, "log")
    await runtime.write("go", b"")
    while (await runtime.run(["test", "-e", "went"], {})).exit_code != 0:
        pass


@shows("verifiers", "E2BRuntime.run_program (process sandboxes)")
async def test_the_main_program_of_a_rollout_runs_once_to_its_end(runtime: Runtime) -> None:
    done = await runtime.run_program(["sh", "-c", "echo ran >> ledger; echo out; echo err >&2; exit 3"], {})
    assert (done.exit_code, done.stdout, done.stderr) == (3, "out\n", "err\n")
    assert await runtime.read("ledger") == b"ran\n"


@shows("verifiers", "E2BRuntime.prepare_execution (network policy)", "differs: noted in the log, without effect")
async def test_a_network_policy_is_taken_note_of(served: Served, config: E2BConfig) -> None:
    restricted = config.model_copy(update={"allow": [], "block": ["*"]})
    async with provision_runtime(restricted) as runtime:
        await runtime.prepare_execution([])
        assert f"names a network for sandbox {runtime.info.id}" in served.live.log("gateway")


@shows("verifiers", "a sandbox that is gone", "works; SandboxError, so a rollout without a reward")
async def test_a_sandbox_that_is_gone_is_an_error_of_the_sandbox(served: Served, runtime: Runtime, e2b_environment: str) -> None:
    with served.http(e2b_environment) as http:
        assert http.delete(f"/api/v1/environments/{runtime.info.id}").status_code in (200, 204)
    with pytest.raises(SandboxError, match="e2b exec failed"):
        await runtime.run(["true"], {})
