"""Which processes the embedded stack consists of: scheduler, CPU nodes, a GPU node, an API node.

The stack of a newcomer's laptop and of a live replay are the same thing with other numbers.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.journal.database import open_engine
from app.journal.overview import HOST_LABEL
from app.journal.status import status
from app.local.embedded import EmbeddedStack
from app.local.processes import METRICS_HOST, METRICS_PORT, Command, StackError
from app.own_groups import usable_cores
from tangram.settings import Settings
from tangram.shards import FIRST
from tangram.wire import of_shard

READY_S = 60.0
GATEWAY_HOST = "127.0.0.1"
HIGHEST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """What to start: `nodes` CPU nodes of `cores` cores and `memory_mb`, `gpu_nodes` GPU nodes of `cells` cells, `api_nodes` API nodes.

    CPU nodes are dealt to the `shards`, each of which has a scheduler. `include` names further modules with Celery tasks for the workers.
    With a `gateway_port` there is a gateway at it, for this machine, with a `web_port` the live page. With a `metrics_port` each process
    serves its metrics, the first at this port and each further one at the next; and there is a process that counts Celery's events.
    """

    policy: str = "elastic"
    nodes: int = 1
    cores: int | None = None
    memory_mb: int | None = None
    gpu_nodes: int = 1
    cells: int = 0
    cell_memory_mb: int | None = None
    api_nodes: int = 1
    services_file: Path | None = None
    gateway_port: int | None = None
    web_port: int | None = None
    metrics_port: int | None = None
    shards: int = 1
    labels: str = ""
    include: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def gateway_url(self) -> str:
        """The address of the gateway, where there is one."""
        return f"http://{GATEWAY_HOST}:{self.gateway_port}"

    @property
    def web_url(self) -> str:
        """The address of the live page, where there is one."""
        return f"http://{GATEWAY_HOST}:{self.web_port}"

    def node_names(self) -> list[str]:
        """Return the names of the nodes, in the order of their start."""
        names = [f"cpu-{number}" for number in range(self.nodes)]
        return [
            *names,
            *(f"gpu-{number}" for number in range(self.gpu_nodes if self.cells else 0)),
            *(f"api-{number}" for number in range(self.api_nodes)),
        ]


def commands(plan: StackPlan) -> list[Command]:
    """Return the processes of a stack, in the order of their start. Raises `StackError` where there are too few ports for them."""
    shared: dict[str, str] = {**plan.variables, "TANGRAM_POLICY": plan.policy, "TANGRAM_SHARDS": str(plan.shards)}
    if plan.labels:
        shared["TANGRAM_LABELS"] = plan.labels
    if plan.services_file is not None:
        shared["TANGRAM_SERVICES_FILE"] = str(plan.services_file.absolute())
    of_shards = [{"TANGRAM_SHARD": str(shard)} for shard in range(plan.shards)]
    found = [Command(of_shard("scheduler", shard), _tangram("scheduler"), {**shared, **own}) for shard, own in enumerate(of_shards)]
    for name in plan.node_names():
        pool, _, number = name.partition("-")
        offers: dict[str, int | None] = {}
        if pool == "cpu":
            offers = {"TANGRAM_CORES": plan.cores, "TANGRAM_MEMORY_MB": plan.memory_mb}
        elif pool == "gpu":
            offers = {"TANGRAM_CELLS": plan.cells, "TANGRAM_CELL_MEMORY_MB": plan.cell_memory_mb}
        given = {key: str(value) for key, value in offers.items() if value is not None}
        if pool == "cpu" and plan.nodes > 1:  # which may offer the same cores of this machine
            labels = shared.get("TANGRAM_LABELS") or os.environ.get("TANGRAM_LABELS", "")
            given["TANGRAM_LABELS"] = ",".join(filter(None, (labels, f"{HOST_LABEL}{socket.gethostname()}")))
        include = [word for module in plan.include for word in ("--include", module)]
        own = of_shards[int(number) % plan.shards if pool == "cpu" else FIRST]
        variables = {**shared, **given, **own, "TANGRAM_NODE_NAME": name}
        # At SIGTERM, a CPU worker leaves its environments to the next one.
        found.append(Command(name, _tangram("worker", pool, *include), variables, signal.SIGINT if pool == "cpu" else signal.SIGTERM))
    if plan.gateway_port is not None:
        found.append(Command("gateway", _tangram("gateway", "--host", GATEWAY_HOST, "--port", str(plan.gateway_port)), shared))
    if plan.web_port is not None:
        found.append(Command("web", _tangram("web", "--host", GATEWAY_HOST, "--port", str(plan.web_port)), shared))
    if plan.metrics_port is None:
        return found
    found.append(Command("metrics", _tangram("metrics"), shared))
    if (last := plan.metrics_port + len(found) - 1) > HIGHEST_PORT:
        most = HIGHEST_PORT - len(found) + 1
        raise StackError(
            f"TANGRAM_METRICS_PORT: {len(found)} processes would take the ports {plan.metrics_port} to {last}: use 1 to {most}"
        )
    served = {"TANGRAM_METRICS_HOST": METRICS_HOST}
    return [replace(one, env={**one.env, **served, METRICS_PORT: str(port)}) for port, one in enumerate(found, start=plan.metrics_port)]


def start(plan: StackPlan, state_dir: Path) -> EmbeddedStack:
    """Return the stack of `plan`, not entered yet."""
    return EmbeddedStack(state_dir, commands(plan))


Wait = Callable[[Callable[[], bool], float], None]
"""Waits until what it is given holds, at most so many seconds. Raises `StackError`."""


def wait_until_up(stack: EmbeddedStack, plan: StackPlan, timeout_s: float = READY_S, wait: Wait | None = None) -> list[str]:
    """Wait until every node has joined, and the gateway and the live page, where there are any, take connections.

    `wait` is the stack's `wait_ready` by default, which ends when a process has ended. Returns the nodes whose commands nothing sets apart.
    Raises `StackError` as `wait`.
    """
    wait = wait or stack.wait_ready
    engine = open_engine(stack.database_url)
    expected = set(plan.node_names())
    wait(lambda: expected <= {node.name for node in status(engine, 0.0).nodes if node.state == "up"}, timeout_s)
    for port in (plan.gateway_port, plan.web_port):
        if port is not None:
            address = (GATEWAY_HOST, port)
            wait(lambda address=address: _answers(address), timeout_s)  # type: ignore[misc]
    bare = [node.name for node in status(engine, 0.0).nodes if "isolation:none" in node.description.get("labels", ())]
    engine.dispose()
    return bare


def settings_of(stack: EmbeddedStack, base: Settings, shards: int = 1) -> Settings:
    """Return settings that point at a stack of so many shards that is up."""
    same = {name: getattr(stack, name) for name in ("broker_url", "result_url", "database_url", "state_dir")}
    return base.model_copy(update={**same, "shards": shards, "shard": FIRST})


def cores_here() -> int:
    """Return the cores that this process may use."""
    return usable_cores(len(os.sched_getaffinity(0)))


def _answers(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, timeout=1.0):
        return True
    return False


def _tangram(*words: str) -> tuple[str, ...]:
    # Not from the working folder (-P), which may have an `app` of its own.
    return (sys.executable, "-P", "-m", "tangram", *words)
