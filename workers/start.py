"""Start a worker process: `tangram worker cpu|gpu|api`.

A worker is an ordinary Celery worker on the threads pool that consumes one queue, `node.<name>`, and is a node to the
scheduler. What it offers comes from the settings and, where they are silent, from the machine.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from celery import signals
from redis import RedisError

from app.action_task import NodeRuntime
from app.celery import app
from app.local.kept_environments import folder_of
from app.own_container import node_name, own_container
from app.own_groups import usable_cores
from app.preconditions import require_broker, require_store
from app.runtime import runtime
from app.services_file import ConfigError, ServicesFile, check_models, load_services_file
from tangram.blobs import Blobs
from tangram.connection import find_addresses, open_store, show
from tangram.errors import StackUnreachable
from tangram.scheduler_watch import SchedulerWatch
from tangram.settings import Settings
from tangram.wire import WireNode, node_label
from workers.consumer import queue_of
from workers.context import ApiContext, CpuContext, GpuContext, provide
from workers.cpu.abstract import Sandbox
from workers.cpu.busy import BusyCores, core_times
from workers.cpu.command_input import CommandInputs
from workers.cpu.cores import CoreMap
from workers.cpu.home_core import HomeCore
from workers.cpu.memory.offer import MemoryOffer, allowed_now
from workers.cpu.memory.pause_trial import Memory
from workers.cpu.streams import OutputStreams
from workers.cpu.topology import Topology
from workers.cpu.weight import Means
from workers.listeners import count, listen, settle, trace
from workers.memory import usable_mb
from workers.node import Node
from workers.shutdown import NodeWorker, Shutdown, end_as_killed
from workers.threads import TaskPool
from workers.unique_name import UniqueName

Pool = Literal["cpu", "gpu", "api"]

STORE_CONNECTIONS = 32
THREADS = {"cpu": 1_064, "gpu": 1_064, "api": 256}
"""The most threads of a worker, beside `THREADS_PER_CORE`; each exists once as many calls as that have run at once.

A command keeps a thread for as long as it runs, most of them in the background. The scheduler has at most 1,000 started on a node
(`scheduler/cpu/elastic.py`), and what it grants beyond that is for the cores. The rest is for files and for control requests, which must
not wait for a command to end. A call of a service keeps a thread until it is answered. On eight cells there may be 64 calls each, and those
that waited for a thread would not be batched.
"""
THREADS_PER_CORE = 8

ALLOW_LIST = "TANGRAM_CONTAINER_ALLOW"
"""A variable that would be taken for a bound on what containers may reach."""

log = logging.getLogger(__name__)

_BACKGROUND: dict[Means, str] = {
    "cgroup": "cgroup (the weight of control groups)",
    "affinity": "affinity (they share the last core with the command on it; more takes a control group, see docs/sandboxes.md)",
}


def run(pool: Pool, settings: Settings, include: Sequence[str] = (), log_level: str = "WARNING") -> None:
    """Run a worker until a signal ends it. `include` names further modules with tasks.

    Raises `StackUnreachable` when there is no broker; `ConfigError` when the services file is wrong, or another worker has this name.
    """
    _raise_open_files()
    addresses = find_addresses(settings)
    store = open_store(addresses.result_url, settings.connect_timeout_s, STORE_CONNECTIONS)
    require_store(store, addresses.result_url)
    require_broker(app, settings.connect_timeout_s)
    watch = SchedulerWatch(settings.shard, settings.shards, settings.beat_s, "this node gets nothing to do")
    sole = UniqueName(store, node_name(pool, settings), settings.beat_s, watch.look)
    try:
        sole.take()  # before anything of a worker before this one is cleared away
    except RedisError as error:
        raise StackUnreachable(f"the result store at {show(addresses.result_url)} does not take the name of the node: {error}") from None
    blobs = Blobs(store, patience_s=math.inf)
    prepared = _SET_UP[pool](settings, blobs)
    same = {name: getattr(settings, name) for name in ("beat_s", "usage_s", "timeout_s", "shard")}
    node = Node(app, store, prepared.description, **same, now=prepared.now, wanted=prepared.wanted)
    prepared.attach(node)
    runtime().provide(NodeRuntime, node)  # type: ignore[type-abstract]
    app.conf.task_queues = [queue_of(node.name)]
    app.conf.include = ["workers.control", f"workers.{pool}.tasks", *include]
    app.conf.worker_consumer = "workers.consumer:NodeConsumer"
    listen(node)
    count(settings, pool, prepared.now)
    trace(settings, pool)
    try:
        worker = NodeWorker(
            Shutdown(node, blobs, sole, settings.hand_over_s, prepared.stands),
            app=app,
            hostname=f"{node.name}@{socket.gethostname()}",
            pool_cls=TaskPool,
            concurrency=THREADS[pool] + THREADS_PER_CORE * prepared.description["cores"],
            loglevel=log_level,
            without_gossip=True,
            without_mingle=True,
        )
        worker.start()
        sys.exit(worker.exitcode)
    finally:
        node.leave()
        prepared.close()
        sole.release()


def _raise_open_files() -> None:
    """Allow this process as many open files as it may have: every environment takes some."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def describe(pool: Pool, settings: Settings, **offers: Any) -> WireNode:
    """Return how a worker of a pool presents itself, with what it `offers`."""
    name = node_name(pool, settings)
    description: WireNode = {
        "name": name,
        "kinds": [pool],
        "labels": [*settings.labels, node_label(name)],
        "cores": 0,
        "memory_mb": 0,
        "cells": 0,
        "cell_memory_mb": 0,
        "services": {},
        "running": [],
        "environments": [],
        "environments_max": settings.environments_max,
        "takes_causes": True,
    }
    description.update(offers)  # type: ignore[typeddict-item]
    return description


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A worker of some pool that has not joined yet.

    `description` is its node, `now` returns the parts of it that change, as they are now, `wanted` the reports that are repeated with
    each beat; `attach` gets the node that the worker is, `close` gives back what it holds. `stands` is that of `Shutdown`.
    """

    description: WireNode
    close: Callable[[], None]
    now: Callable[[], dict[str, Any]] = dict
    wanted: Callable[[], list[dict[str, Any]]] = list
    attach: Callable[[Node], None] = lambda node: None
    stands: Callable[[], bool] | None = None


def _offered_cores(settings: Settings, machine: Topology, usable: Callable[[int], int] = usable_cores) -> list[list[int]]:
    """Return the ids of the cores to offer, by domain.

    They are the machine's own, less the reserved ones and what a quota takes from commands of this process. Where more are to be offered
    than it has, they are made up, in one domain. Raises `ConfigError` where nothing is left to be offered.
    """
    left, all_of_them = machine.without(settings.reserved_cores), len(machine.cores)
    if not left.cores:
        raise ConfigError(f"TANGRAM_RESERVED_CORES={settings.reserved_cores} leaves nothing of the {all_of_them} cores here")
    wanted = settings.cores or (usable(all_of_them) if settings.sandbox == "process" else all_of_them)
    if wanted > all_of_them:
        return [list(range(wanted))]
    return [list(domain.cores) for domain in left.first(wanted).domains]


def _set_up_cpu(settings: Settings, blobs: Blobs) -> Prepared:
    machine = Topology.of_this_process()
    domains = _offered_cores(settings, machine)
    core_map = CoreMap(tuple(sorted(machine.without(settings.reserved_cores).cores)))
    memory = MemoryOffer(settings)
    description = describe("cpu", settings, cores=sum(map(len, domains)), domains=domains, memory_mb=memory.memory_mb)
    base = folder_of(settings.state_dir, description["name"], settings.shard, settings.shards)
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    end_as_killed()  # from what is adopted on
    if settings.sandbox == "process":
        sandbox, isolation = _process_sandbox(base, core_map, settings, memory.memory)
    else:
        sandbox, isolation = _container_sandbox(base, core_map, description["name"], settings, memory.memory), "container"
    description["labels"] += [f"isolation:{isolation}", f"background:{sandbox.background}"]
    description["labels"].append(f"memory:{'enforced' if sandbox.enforces_memory else 'not-enforced'}")
    _say_what_is_held(sandbox, memory.declare(description, sandbox), memory.level)
    streams = OutputStreams(blobs.store)
    provide(CpuContext(settings=settings, blobs=blobs, sandbox=sandbox, streams=streams, inputs=CommandInputs()))
    offered = [core for domain in domains for core in domain]
    busy = BusyCores(offered if set(offered) <= set(machine.cores) else (), times := core_times())
    settle(home := HomeCore(machine.cores, times))

    def now() -> dict[str, Any]:
        home.look(times := core_times())
        standing = [environment.spec.id for environment in sandbox.environments()]
        return {"environments": standing, "lost": [*map(astuple, sandbox.losses())], **allowed_now(sandbox), **busy.since_last(times)}

    def close() -> None:
        sandbox.close()
        streams.close()

    def attach(node: Node) -> None:
        sandbox.watcher.on_wanted = node.report
        node.go_on_with(sandbox.left_messages)

    stands = (lambda: bool(sandbox.environments()) and sandbox.is_kept()) if sandbox.outlives_worker else None
    return Prepared(description=description, now=now, wanted=sandbox.watcher.wanted, attach=attach, close=close, stands=stands)


def _say_what_is_held(sandbox: Sandbox, by_limits: str, by_limits_level: int) -> None:
    def say(**_: Any) -> None:
        if not sandbox.enforces_memory:
            log.warning("memory_mb of environments is not enforced: this worker may not write control groups for memory")
        if by_limits:
            log.log(by_limits_level, "the memory of environments is booked by their limits, not granted as it is used: %s", by_limits)
        means, weak = sandbox.background, sandbox.background == "affinity"
        log.log(logging.WARNING if weak else logging.INFO, "commands are held in the background by: %s", _BACKGROUND[means])

    # Celery sets logging up only later.
    signals.worker_ready.connect(say, weak=False)


def _process_sandbox(base: Path, core_map: CoreMap, settings: Settings, memory: Memory) -> tuple[Sandbox, str]:
    from workers.cpu.errors import SessionUnavailable
    from workers.cpu.process.sandbox import ProcessSandbox

    try:
        sandbox = ProcessSandbox(
            base,
            core_map=core_map,
            disk_floor_mb=settings.disk_floor_mb,
            memory_mb=settings.process_memory_mb,
            memory=memory,
            isolation=settings.isolation,
            keep_s=settings.node_lost_s,
        )
    except SessionUnavailable as error:
        raise ConfigError(f"TANGRAM_ISOLATION={settings.isolation}: {error}") from error

    def say(**_: Any) -> None:
        level = logging.WARNING if settings.isolation == "auto" and sandbox.isolation == "none" else logging.INFO
        shared = "; all environments share /tmp" if sandbox.isolation == "none" else ""
        log.log(level, "commands are set apart by: %s%s (%s)", sandbox.isolation, shared, sandbox.isolation_reason)
        if sandbox.enforces_memory:
            most = (sandbox.memory_mb, sandbox.default_memory_mb)
            log.info("environments have at most %d MiB together, and %d each where they name none", *most)

    signals.worker_ready.connect(say, weak=False)
    return sandbox, sandbox.isolation


def _container_sandbox(base: Path, core_map: CoreMap, node: str, settings: Settings, memory: Memory) -> Sandbox:
    try:
        from workers.cpu.docker.options import ContainerLimits, ContainerOptions
        from workers.cpu.docker.sandbox import ContainerSandbox
    except ModuleNotFoundError as error:
        raise ConfigError("TANGRAM_SANDBOX=docker needs the extra `containers`: pip install 'arl-tangram-server[containers]'") from error
    if os.environ.get(ALLOW_LIST):
        raise ConfigError(
            f"{ALLOW_LIST} is not supported: let TANGRAM_CONTAINER_NETWORK name a Docker network with an egress proxy (docs/containers.md)"
        )
    # Files of containers are opened as their user; the groups of this process would come with it.
    with suppress(PermissionError):
        os.setgroups([])
    limits = ContainerLimits(
        memory_mb=settings.container_memory_mb, processes=settings.container_processes, disk_mb=settings.container_disk_mb
    )
    options = ContainerOptions(
        user=settings.container_user,
        image=settings.image,
        network=settings.container_network,
        read_only=settings.container_read_only,
        runtime=settings.container_runtime,
        pull=settings.image_pull,
        pull_s=settings.image_pull_s,
        image_cache_mb=settings.image_cache_mb,
        start_timeout_s=settings.container_start_s,
        starting_limit=settings.containers_starting,
        disk_floor_mb=settings.disk_floor_mb,
        warm=settings.warm,
        limits=limits,
    )
    image = own.image if (own := own_container()) is not None else None
    return ContainerSandbox(
        base, node=node, options=options, core_map=core_map, memory=memory, keep_s=settings.node_lost_s, keeper_image=image
    )


def _set_up_gpu(settings: Settings, blobs: Blobs) -> Prepared:
    from workers.gpu.device_memory import device_memory, offered
    from workers.gpu.devices import discover
    from workers.gpu.engines.factory import open_contexts
    from workers.gpu.engines.vllm.folders import end_leftovers
    from workers.gpu.host import ServiceHost
    from workers.gpu.instances import InstanceStatus
    from workers.gpu.prefetch import Prefetch
    from workers.gpu.reload import Reload, described

    declared = ServicesFile.model_construct(services={}, quotas={})
    if settings.services_file is not None:
        declared = load_services_file(settings.services_file)
        check_models(settings.services_file, declared)
    state_dir: Path = settings.state_dir / "services"
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    # They may hold the memory that the devices are about to be asked for.
    left = end_leftovers(state_dir)
    found = discover(settings.cells, settings.cell_memory_mb, settings.gpu_order or None)
    memory = device_memory(found)
    open_contexts(found, declared.services)
    devices = offered(found, memory, settings.cell_memory_mb)
    host_memory_mb = settings.host_memory_mb or usable_mb() // 2
    host = ServiceHost(devices, declared.services, state_dir, host_memory_mb=host_memory_mb, memory=memory)
    reload = Reload(settings.services_file, host, settings.beat_s)
    provide(GpuContext(settings=settings, blobs=blobs, host=host, prefetch=Prefetch(host)))

    def now() -> dict[str, Any]:
        there = [status.to_wire() for status in host.status() if status.state != "absent"]
        return {"services": described(host), "instances": there}

    def attach(node: Node) -> None:
        def tell(status: InstanceStatus) -> None:
            node.report({"type": "service", "node": node.name, **status.to_wire(), "at": time.time()})

        def begin(**_: Any) -> None:
            if left:  # Celery sets logging up only now
                log.warning("ended processes of vLLM servers that a worker had left: %d", len(left))
            # Celery has a handler of its own for this signal, set before the worker is ready, that restarts the process.
            signal.signal(signal.SIGHUP, lambda *_: reload.ask())
            reload.start()

        host.listen(tell)
        signals.worker_ready.connect(begin, weak=False)

    def close() -> None:
        reload.stop()
        host.close()

    cell_memory_mb = min(device.memory_mb for device in devices)
    services = described(host)
    description = describe("gpu", settings, cells=len(devices), cell_memory_mb=cell_memory_mb, services=services)
    return Prepared(description=description, now=now, attach=attach, close=close)


def _set_up_api(settings: Settings, blobs: Blobs) -> Prepared:
    from workers.api.requests import Requests

    requests = Requests()
    provide(ApiContext(settings=settings, blobs=blobs, requests=requests))
    return Prepared(description=describe("api", settings), close=requests.close)


_SET_UP: dict[Pool, Callable[[Settings, Blobs], Prepared]] = {"cpu": _set_up_cpu, "gpu": _set_up_gpu, "api": _set_up_api}
