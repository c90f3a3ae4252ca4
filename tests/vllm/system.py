"""A whole stack with a reward model and a teacher behind vLLM servers that share one cell, and what a test does to it."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.local.stack import StackPlan
from tangram import Client
from tests.freezing import freeze
from tests.live.support import Live, running
from tests.vllm.fakes import gone, until

CELL_MB = 4000

_SERVICE = """
[services.{name}]
engine = "vllm"
task = "{task}"
model = "{model}"
memory_mb = {memory_mb}
max_concurrency = 4

[services.{name}.vllm]
python = "{python}"
sleep_on_cpu = true
start_timeout_s = 600
args = ["--max-model-len", "512"]
env = {{ {env} }}
"""


def services_toml(models: Path, python: Path, environments: Mapping[str, Mapping[str, str]]) -> str:
    """Return a services file with `rm` and `teacher`, of which the cell takes one; `environments` are their servers'."""
    tables = []
    for name, task, model in (("rm", "score", "rm-small"), ("teacher", "logprobs", "teacher-0")):
        env = ", ".join(f"{key} = {json.dumps(value)}" for key, value in environments.get(name, {}).items())
        shown = _SERVICE.format(name=name, task=task, model=models / model, memory_mb=CELL_MB * 3 // 4, python=python, env=env)
        tables.append(shown)
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


def _serves(process: psutil.Process, service: str) -> bool:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        return "--served-model-name" in words and words[words.index("--served-model-name") + 1] == service
    return False


def _is_guard(process: psutil.Process) -> bool:
    return any(word.endswith("guard.py") for word in process.cmdline())
