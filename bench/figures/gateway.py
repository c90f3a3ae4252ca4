"""Figures of the gateway: how late its event loop runs, what memory an upload takes, and what short calls wait beside it."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from psutil import Process

from app.gateway.tokens import make_token
from app.journal.database import open_engine
from app.local.stack import StackPlan
from bench.figures.registry import figure
from bench.gateway_counts import Lags
from bench.tools import MIB, NotMeasured, free_port, process_of, running

BODY_MIB, FORM_MIB = 256, 128
CALLS, CALLERS = 100, 10
ROLLOUTS, OPENED_AT_ONCE, HELD_S = 256, 32, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway of a stack."""

    url: str
    token: str
    process: Process

    @property
    def e2b_options(self) -> dict[str, str]:
        """The options of E2B's client for it."""
        return {"api_key": self.token, "api_url": self.url, "sandbox_url": self.url}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """What an upload did to the gateway and to the short calls beside it."""

    growth_mib: float
    lag_s: float
    slower: float


@figure("MiB")
def upload_growth() -> float:
    """Return most growth of the gateway's memory during uploads of 256 MiB as a body and of 128 MiB as a form."""
    return max(upload.growth_mib for upload in _uploads())


@figure("s")
def upload_lag() -> float:
    """Return lag of the gateway's event loop during uploads of 256 and 128 MiB, 99th percentile, the worse of the two."""
    return max(upload.lag_s for upload in _uploads())


@figure("×")
def upload_short_calls() -> float:
    """Return the time of a short command beside an upload of 256 or 128 MiB, over one without, the worse of the two medians."""
    return max(upload.slower for upload in _uploads())


@figure("s")
def rollouts_lag() -> float:
    """Return lag of the gateway's event loop while 256 rollouts wait for their commands, 99th percentile."""
    import aiohttp

    async def measured(gateway: Gateway) -> float:
        headers, connector, timeout = {"X-API-Key": gateway.token}, aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
        async with aiohttp.ClientSession(gateway.url, headers=headers, connector=connector, timeout=timeout) as http:

            async def said(path: str, body: dict[str, str]) -> dict[str, Any]:
                async with http.post(f"/api/v1/environments{path}", json=body) as answer:
                    return dict(await answer.json())

            gate = asyncio.Semaphore(OPENED_AT_ONCE)

            async def opened() -> str:
                async with gate:
                    return str((await said("", {}))["id"])

            environments = await asyncio.gather(*(opened() for _ in range(ROLLOUTS)))
            lags = Lags(gateway.url)
            await lags.start()
            answers = await asyncio.gather(*(said(f"/{one}/exec", {"command": f"sleep {HELD_S}; echo done"}) for one in environments))
            if wrong := [answer for answer in answers if answer.get("stdout") != "done\n"]:
                raise NotMeasured(f"{len(wrong)} rollouts have no result: {wrong[0]}")
            return await lags.p99_s()

    with _gateway(cores=ROLLOUTS, memory_mb=10**6) as gateway:
        return asyncio.run(measured(gateway))


@figure("ms")
def alive_beside_command() -> float:
    """Return SWE-ReX's `is_alive` beside a busy session, beyond a call that does nothing, median of 11."""
    import aiohttp
    from swerex.runtime.abstract import BashAction, BashInterruptAction, Command, CreateBashSessionRequest

    async def measured(gateway: Gateway) -> float:
        runtime = await _runtime(gateway)

        async def healthy() -> None:
            async with aiohttp.ClientSession() as session, session.get(f"{gateway.url}/health") as answer:
                answer.raise_for_status()

        await runtime.create_session(CreateBashSessionRequest())
        busy = asyncio.create_task(runtime.run_in_session(BashAction(command="touch busy; sleep 60", check="silent")))
        while (await runtime.execute(Command(command=["test", "-e", "busy"]))).exit_code != 0:
            await asyncio.sleep(0.05)
        beyond = [await _took_s(lambda: runtime.is_alive(timeout=60)) - await _took_s(healthy) for _ in range(11)]
        await runtime.run_in_session(BashInterruptAction())
        await busy
        await runtime.close()
        return median(beyond)

    with _gateway() as gateway:
        return 1e3 * asyncio.run(measured(gateway))


@cache
def _uploads() -> tuple[Upload, Upload]:
    """Upload a file as a body and one as a form, each beside short commands."""

    async def measured(gateway: Gateway, folder: Path) -> tuple[Upload, Upload]:
        e2b = _e2b()
        sandboxes = await asyncio.gather(*(e2b.AsyncSandbox.create(**gateway.e2b_options) for _ in range(CALLERS)))
        usual_s = median(await _short_calls(sandboxes))
        body = await _beside(gateway, _e2b_upload(gateway, _random_file(folder / "body", BODY_MIB)), sandboxes, usual_s)
        form = await _beside(gateway, _rex_upload(gateway, _random_file(folder / "form", FORM_MIB)), sandboxes, usual_s)
        await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))
        return body, form

    larger = {"TANGRAM_GATEWAY_BODY_MB": str(2 * BODY_MIB)}
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder, _gateway(cores=8, variables=larger) as gateway:
        return asyncio.run(measured(gateway, Path(folder)))


async def _beside(gateway: Gateway, upload: Awaitable[None], sandboxes: list[Any], usual_s: float) -> Upload:
    """Run short commands beside an upload, and watch the gateway."""
    lags, before, most = Lags(gateway.url), gateway.process.memory_info().rss, 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, gateway.process.memory_info().rss)
            await asyncio.sleep(0.02)

    await lags.start()
    watching, uploading = asyncio.create_task(watch()), asyncio.ensure_future(upload)
    during = await _short_calls(sandboxes)
    await uploading
    watching.cancel()
    return Upload(growth_mib=max(0, most - before) / MIB, lag_s=await lags.p99_s(), slower=median(during) / usual_s)


async def _short_calls(sandboxes: list[Any]) -> list[float]:
    """Run short commands, some at once, and return how long each took."""

    async def caller(sandbox: Any) -> list[float]:
        return [await _took_s(lambda: sandbox.commands.run("echo short", timeout=300)) for _ in range(CALLS // CALLERS)]

    return [one for some in await asyncio.gather(*map(caller, sandboxes)) for one in some]


async def _e2b_upload(gateway: Gateway, path: Path) -> None:
    sandbox = await _e2b().AsyncSandbox.create(**gateway.e2b_options)
    with path.open("rb") as file:
        await sandbox.files.write("large", file, request_timeout=600)
    await sandbox.kill()


async def _rex_upload(gateway: Gateway, path: Path) -> None:
    from swerex.runtime.abstract import UploadRequest

    runtime = await _runtime(gateway)
    await runtime.upload(UploadRequest(source_path=str(path), target_path="large"))
    await runtime.close()


async def _runtime(gateway: Gateway) -> Any:
    """Open an environment, and return SWE-ReX's client of it."""
    from swerex.runtime.remote import RemoteRuntime

    async with httpx.AsyncClient(base_url=gateway.url, headers={"X-API-Key": gateway.token}, timeout=180) as http:
        opened = (await http.post("/api/v1/environments", json={})).raise_for_status().json()["id"]
    return RemoteRuntime(host=f"{gateway.url}/envs/{opened}", auth_token=gateway.token)


def _e2b() -> Any:
    import e2b

    return e2b


async def _took_s(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


def _random_file(path: Path, size_mib: int) -> Path:
    """Write a file that does not compress."""
    with path.open("wb") as file:
        for _ in range(size_mib):
            file.write(secrets.token_bytes(MIB))
    return path


@contextmanager
def _gateway(cores: int = 2, memory_mb: int = 65_536, variables: dict[str, str] | None = None) -> Iterator[Gateway]:
    plan = StackPlan(cores=cores, memory_mb=memory_mb, api_nodes=0, gateway_port=free_port(), variables=variables or {})
    with running(plan) as started:
        engine = open_engine(started.database_url)
        token = make_token(engine, "figures")
        engine.dispose()
        yield Gateway(url=plan.gateway_url, token=token, process=process_of(started, "gateway"))
