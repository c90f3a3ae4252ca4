"""A whole stack with a reward model and a teacher behind vLLM servers that share one cell, and what a test does to it."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.local.stack import StackPlan
from tangram import Client
from tests.freezing import freeze
from tests.live.support import Live, running
from tests.vllm.fakes import gone, until
from workers.gpu.engines.vllm.questions import Pooling, score_request

CELL_MB = 4000

_SERVICE = """
[services.{name}]
engine = "vllm"
task = "{task}"
model = "{model}"
memory_mb = {memory_mb}
max_concurrency = 4
{more}

[services.{name}.vllm]
python = "{python}"
pooling = "{pooling}"
sleep_on_cpu = true
start_timeout_s = 600
args = ["--max-model-len", "512"]
env = {{ {env} }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A service: the folder of its model, further lines of its table, what its server computes, and variables of that."""

    model: Path
    more: str = ""
    pooling: Pooling = "classify"
    env: Mapping[str, str] = field(default_factory=dict)


def services_toml(python: Path, rm: Served, teacher: Served) -> str:
    """Return a services file with `rm` and `teacher`, of which the cell takes one."""
    tables = []
    for name, task, served in (("rm", "score", rm), ("teacher", "logprobs", teacher)):
        env = ", ".join(f"{key} = {json.dumps(value)}" for key, value in served.env.items())
        said = {"model": served.model, "more": served.more, "pooling": served.pooling, "env": env}
        tables.append(_SERVICE.format(name=name, task=task, memory_mb=CELL_MB * 3 // 4, python=python, **said))
    return "".join(tables)


@dataclass
class System:
    """A stack that is up and a client of it."""

    live: Live
    client: Client

    def server(self, service: str) -> psutil.Process:
        """Return the process of a service's server, the one that listens."""
        found = [process for process in self.live.process("gpu-0").children(recursive=True) if _serves(process, service)]
        (server,) = [process for process in found if "--uds" in process.cmdline() and not _is_guard(process)]
        return server

    def core(self, service: str) -> psutil.Process:
        """Return the process of a real server that computes for the one that listens."""
        (core,) = [process for process in self.server(service).children() if "EngineCore" in process.name()]
        return core

    def ask(self, service: str, method: str, path: str, body: object = None, timeout_s: float = 60.0) -> Any:
        """Ask a server past the system."""
        words = self.server(service).cmdline()
        socket = words[words.index("--uds") + 1]
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://vllm", timeout=timeout_s) as http:
            return http.request(method, path, json=body).raise_for_status().json()

    def sleeps(self, service: str) -> bool:
        """Say whether a service's server sleeps."""
        return bool(self.ask(service, "GET", "/is_sleeping")["is_sleeping"])

    def ends(self) -> dict[str, int]:
        """Return how many actions are in which status; the journal may be a moment behind the results."""
        return dict(tuple(row) for row in self.live.rows("SELECT status, count(*) FROM actions GROUP BY status"))

    def kill_while_it_works(self, process: psutil.Process, calls: list[Callable[[], Any]]) -> list[Any]:
        """Make calls, kill a process of the server once they are being worked on, and return what the calls return."""
        freeze(process.pid)
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            # As many as the service takes at a time wait for a process that does not move.
            until(lambda: self.live.rows("SELECT count(*) FROM actions WHERE status = 'running'")[0][0] >= 4)
            process.send_signal(signal.SIGKILL)
            return [future.result() for future in futures]


@contextlib.contextmanager
def system(folder: Path, services: Path) -> Iterator[System]:
    """Run a stack with one cell. Its end leaves no server behind."""
    # A worker that a busy machine holds up for half a minute is not lost.
    variables = {"TANGRAM_BEAT_S": "10"}
    plan = StackPlan(nodes=0, cells=1, cell_memory_mb=CELL_MB, api_nodes=0, services_file=services, variables=variables)
    servers: list[int] = []
    with running(folder, plan) as live:
        with live.client("vllm") as client:
            yield System(live, client)
        servers = [process.pid for process in live.process("gpu-0").children(recursive=True)]
    until(lambda: all(gone(pid) for pid in servers))


def take_turns(
    stack: System, items: list[dict[str, Any]], sequences: list[list[int]], pooling: Pooling, victim: Callable[[], psutil.Process]
) -> tuple[list[float], list[list[float]], int]:
    """Have the services take turns on their cell, and kill a process of `rm` at work.

    Return what both answered, and the process of the first server of `rm`.
    """
    close: dict[str, Any] = {"abs": 1e-4, "rel": 0.0}
    scores = list(stack.client.score("rm", items))
    logprobs = [list(values) for values in stack.client.logprobs("teacher", sequences)]
    # Given a server that sleeps, of which nothing but `/is_sleeping` tells that it will not answer
    assert stack.sleeps("rm") and not stack.sleeps("teacher")
    server = stack.server("rm").pid
    stack.ask("rm", "GET", "/v1/models")
    with pytest.raises(httpx.ReadTimeout):
        stack.ask("rm", *score_request("rm", [[1, 2]], pooling), timeout_s=1.0)
    # Then it is woken before it is asked
    assert stack.client.score("rm", items) == pytest.approx(scores, **close)
    assert stack.sleeps("teacher") and not stack.sleeps("rm") and stack.server("rm").pid == server
    # And when what computes for it is killed, each action is done by one other
    for answer in stack.kill_while_it_works(victim(), [lambda: stack.client.score("rm", items)] * 12):
        assert answer == pytest.approx(scores, **close)
    for values, before in zip(stack.client.logprobs("teacher", sequences), logprobs, strict=True):
        assert list(values) == pytest.approx(before, **close)
    stack.live.until(lambda: stack.ends() == {"succeeded": 16})
    return scores, logprobs, server


def _serves(process: psutil.Process, service: str) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        # With an adapter, the service's own name is the adapter's.
        return "--served-model-name" in words and words[words.index("--served-model-name") + 1] in (service, f"{service}-base")
    return False


def _is_guard(process: psutil.Process) -> bool:
    return any(word.endswith("guard.py") for word in process.cmdline())
