"""Large uploads beside many short calls: the gateway holds a part at a time, and nobody waits behind a body."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from app.local.stack import StackPlan
from bench.gateway_counts import MIB, Lags
from tests.gateway.conftest import Served, free_port, options_of
from tests.live.support import running

pytest.importorskip("swerex", reason="the extra `clients` is not installed")

from swerex.runtime.abstract import Command, UploadRequest
from swerex.runtime.remote import RemoteRuntime

e2b = pytest.importorskip("e2b", reason="the extra `clients` is not installed")

UPLOAD_MIB, FORM_MIB = 256, 128
"""What is uploaded as a body, and as a form, which is dearer to read."""

CALLS, CALLERS = 100, 10
MOST_GROWTH_MIB = 96
"""What the gateway's memory may grow by during an upload: some parts, not the body."""

MOST_LAG_S = 0.25
"""Far above what is measured on a quiet machine, far below what one body in one piece would take.

On a busy machine it is three times what there is without an upload, where that is more.
"""


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    pytest.importorskip("fastapi", reason="the extra `gateway` is not installed")
    variables = {"TANGRAM_GATEWAY_BODY_MB": str(2 * UPLOAD_MIB)}
    plan = StackPlan(nodes=1, cores=8, memory_mb=65536, api_nodes=0, gateway_port=free_port(), variables=variables)
    with running(tmp_path_factory.mktemp("uploads") / "state", plan) as live:
        yield Served(live, plan.gateway_url)


def random_file(path: Path, size_mib: int) -> Path:
    """Write a file that does not compress."""
    with path.open("wb") as file:
        for _ in range(size_mib):
            file.write(secrets.token_bytes(MIB))
    return path


async def e2b_upload(served: Served, path: Path) -> int:
    """Write the file as one body, and return its size there."""
    sandbox = await e2b.AsyncSandbox.create(**options_of(served, "uploads"))
    try:
        with path.open("rb") as file:
            await sandbox.files.write("large", file, request_timeout=600)
        return int((await sandbox.commands.run("stat -c %s large")).stdout)
    finally:
        await sandbox.kill()


async def rex_upload(served: Served, path: Path) -> int:
    """Upload the file as a form, and return its size there."""
    opened = await asyncio.to_thread(_opened, served)
    runtime = RemoteRuntime(host=f"{served.url}/envs/{opened}", auth_token=served.token("uploads"))
    try:
        await runtime.upload(UploadRequest(source_path=str(path), target_path="large"))
        return int((await runtime.execute(Command(command=["stat", "-c", "%s", "large"]))).stdout)
    finally:
        await runtime.close()


def _opened(served: Served) -> str:
    with served.http("uploads") as http:
        return str(http.post("/api/v1/environments", json={}).json()["id"])


async def short_calls(sandboxes: list[Any]) -> list[float]:
    """Run short commands, some at once, and return how long each took."""

    async def caller(sandbox: Any) -> list[float]:
        times = []
        for _ in range(CALLS // CALLERS):
            began = time.perf_counter()
            assert (await sandbox.commands.run("echo short", timeout=300)).stdout == "short\n"
            times.append(time.perf_counter() - began)
        return times

    return [one for some in await asyncio.gather(*map(caller, sandboxes)) for one in some]


@contextlib.asynccontextmanager
async def most_memory(served: Served) -> AsyncIterator[Callable[[], float]]:
    """Watch the gateway's memory; give what says by how many MiB it has grown at most."""
    process = served.live.process("gateway")
    before = most = process.memory_info().rss

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    try:
        yield lambda: (most - before) / MIB
    finally:
        task.cancel()


def test_short_calls_go_on_beside_a_large_upload(roomy: Served, tmp_path: Path) -> None:
    async def measured() -> None:
        # Given what short commands take by themselves
        options = options_of(roomy, "short")
        sandboxes = await asyncio.gather(*(e2b.AsyncSandbox.create(**options) for _ in range(CALLERS)))
        lags = Lags(roomy.url)
        await lags.start()
        before = await short_calls(sandboxes)
        usual_s = await lags.p99_s()
        for upload, size_mib in ((e2b_upload, UPLOAD_MIB), (rex_upload, FORM_MIB)):
            large = random_file(tmp_path / f"{size_mib}", size_mib)
            await lags.start()
            # When a large file is uploaded, and short commands run meanwhile
            async with most_memory(roomy) as growth:
                uploading = asyncio.create_task(upload(roomy, large))
                during = await short_calls(sandboxes)
                assert await uploading == size_mib * MIB
            # Then the gateway never held it, its loop ran, and the commands took about as long
            assert growth() < MOST_GROWTH_MIB, upload
            assert await lags.p99_s() < max(MOST_LAG_S, 3 * usual_s), upload
            assert median(during) < 10 * median(before) + 0.5, upload
        await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))

    asyncio.run(measured())
