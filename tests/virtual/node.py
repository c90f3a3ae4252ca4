"""A CPU node in virtual time: the worker's own node, reporter and tasks, run by Celery's tracer. Queue, pool and sandbox are made up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from celery import signals
from celery.app.trace import build_tracer
from kombu.utils.json import loads
from redis import RedisError

from app import celery as worker_app
from app.action_task import ActionTask, NodeRuntime, call_of
from app.broker.memory_store import MemoryStore
from app.runtime import Runtime, enter, runtime
from tangram import clock
from tangram.blobs import Blobs
from tangram.settings import Settings
from tangram.wire import GRANT_HEADER, WireGrant, WireNode, node_queue
from tests.virtual.api import Api
from tests.virtual.clock import Process
from tests.virtual.network import Network
from tests.virtual.sandbox import Claim, Ledger, VirtualEnvironment, VirtualSandbox
from workers.context import CpuContext, provide
from workers.control import this_node
from workers.cpu import tasks
from workers.cpu.command_input import CommandInputs
from workers.cpu.memory.offer import allowed_now
from workers.cpu.streams import OutputStreams
from workers.node import Node, Try
from workers.start import describe

assert tasks, "importing it registers the tasks"
APP = worker_app.app


@APP.task(name="virtual.work", base=ActionTask)  # type: ignore[untyped-decorator]
def work(work_s: float, number: int, quota: str = "") -> int:
    """Do something without an environment that may be done twice, at an API where it draws on a quota."""
    call, node = this_node().call(work.request.id), this_node().name
    run = runtime().part(Ledger).begin(call.id, worker=node)  # type: ignore[union-attr]
    with runtime().part(Api).takes(call, node, quota, work_s) if quota else nullcontext():  # type: ignore[union-attr]
        clock.sleep(work_s)
    run.outcome = "succeeded"
    return number


@signals.task_postrun.connect
def _ran(task: Any, **_: Any) -> None:
    call = call_of(task)
    if call is not None and runtime().part(NodeRuntime) is not None:  # type: ignore[type-abstract]
        this_node().finish(call)


class WatchedNode(Node):
    """A node whose claims are in the ledger, in the order in which it let them through."""

    ledger: Ledger
    worker: str

    def _may_claim(self, one: Try, grant: WireGrant) -> bool:
        may = super()._may_claim(one, grant)
        if may:
            self.ledger.claims.append(Claim(*one, self.worker, grant["epoch"]))
        return may


class VirtualNode:
    """One node of a world, whose worker may be killed and started again."""

    def __init__(self, network: Network, ledger: Ledger, settings: Settings, name: str, cores: int, memory_mb: int = 0) -> None:
        """Describe the node, of the shard that settings name. It grants its memory as environments use it if `memory_mb` is given."""
        self._network, self._ledger, self.settings = network, ledger, settings
        self.name, self.cores, self.memory_mb = name, cores, memory_mb
        self.starts = 0
        self.shards: set[int] = set()
        """Those of which its workers were a node."""
        self.is_sick = False
        """Whether it can open no environment."""
        self.process: Process | None = None
        self.sandbox: VirtualSandbox | None = None
        self._left: tuple[VirtualEnvironment, ...] = ()
        self._left_at = 0.0

    def start(self, *, adopts: bool = False) -> None:
        """Start a worker process, which `adopts` what the one before it has left, if it was killed just now."""
        self.starts += 1
        self.shards.add(self.settings.shard)
        if not adopts or self._network.world.now - self._left_at > self.settings.node_lost_s:
            self._left = ()
        own = Runtime()
        self.process = Process(self._network.world, self.name, lambda: enter(own))
        self.process.run(self._run, "worker")

    def kill(self) -> None:
        """Kill the worker process, and its environments unless the next one adopts them."""
        assert self.process is not None
        self._left, self._left_at = self.sandbox.environments() if self.sandbox is not None else (), self._network.world.now
        for environment in self._left:
            environment.leave_all()
        self._ledger.cores.pop(f"{self.name}/{self.starts}", None)
        self.process.kill()

    def stop(self, *, hands_over: bool = False) -> None:
        """Have the worker leave, as SIGINT does, or hand over, as SIGTERM does."""
        assert self.process is not None
        process, node, worker = self.process, self._node, f"{self.name}/{self.starts}"
        self._left = ()

        def leave() -> None:
            if hands_over and node.hand_over(self.settings.hand_over_s) and self.sandbox is not None and self.sandbox.environments():
                node.send_rest()
                self.kill()
            node.leave()
            self._ledger.cores.pop(worker, None)
            process.kill()

        process.run(leave, "leave")

    def _run(self) -> None:
        settings, worker = self.settings, f"{self.name}/{self.starts}"
        description, look = self.prepare(worker)

        def now() -> dict[str, Any]:
            seen = look()
            self._network.world.starve("workers.reporter")  # which sends it
            return seen

        self._node = node = WatchedNode(
            APP,
            MemoryStore(self._network.broker),  # type: ignore[arg-type]
            description,
            beat_s=settings.beat_s,
            usage_s=settings.usage_s,
            timeout_s=settings.timeout_s,
            shard=settings.shard,
            now=now,
            wanted=lambda: self.sandbox.wanted() if self.sandbox is not None else [],
        )
        node.ledger, node.worker = self._ledger, worker
        runtime().provide(NodeRuntime, node)  # type: ignore[type-abstract]
        runtime().provide(Ledger, self._ledger)
        runtime().provide(Api, self._network.api)
        if self.sandbox is not None:
            self.sandbox.watcher.on_wanted = node.report
            node.go_on_with(self.sandbox.left_messages)
        self._go_on(node)
        self.joins(node)
        node.join()
        self._consume(node)

    def prepare(self, worker: str) -> tuple[WireNode, Callable[[], dict[str, Any]]]:
        """Return what the node is, and what says how it is now."""
        settings, store, random = self.settings, MemoryStore(self._network.broker), self._network.world.random
        opening_s = lambda: random.choice((0.01, 0.1, 0.5, 2.0))  # noqa: E731
        self.sandbox = sandbox = VirtualSandbox(worker, self._ledger, opening_s, lambda: self.is_sick, self._left, self.memory_mb)
        blobs = Blobs(store, patience_s=math.inf)  # type: ignore[arg-type]
        provide(CpuContext(settings=settings, blobs=blobs, sandbox=sandbox, streams=OutputStreams(store), inputs=CommandInputs()))  # type: ignore[arg-type]
        settings = settings.model_copy(update={"node_name": self.name})
        description = describe("cpu", settings, cores=self.cores, memory_mb=self.memory_mb or 4096)
        description["grants_memory"] = self.memory_mb > 0
        standing = lambda: [one.spec.id for one in sandbox.environments()]  # noqa: E731
        return description, lambda: {"environments": standing(), **allowed_now(sandbox)}

    def _go_on(self, node: Node) -> None:
        """Carry out what the worker before this one has left running, as `NodeConsumer` does."""
        assert self.process is not None
        while node.resumed:
            said = node.resumed.pop()
            node.note_arrival(said.headers["id"])
            message = {"headers": said.headers, "body": said.body}
            self.process.run(lambda message=message: self._carry_out(message), str(said.headers["task"]))  # type: ignore[misc]

    def joins(self, node: Node) -> None:
        """Take note of the worker's node."""

    def _consume(self, node: Node) -> None:
        """Take messages as Celery's consumer does: each is off the queue once it is here, and runs in a thread of its own."""
        broker, arrived = self._network.broker, clock.event()
        queue = node_queue(self.name)
        broker.listen(queue, arrived)
        process = self.process
        assert process is not None
        while True:
            arrived.clear()
            try:
                broker.called("pop", queue)
            except (RedisError, OSError):
                clock.sleep(0.5)
                continue
            raw = broker.pop(queue)
            if raw is None:
                arrived.wait(5.0)
                continue
            message = loads(raw.decode())
            if GRANT_HEADER in message["headers"]:
                node.note_arrival(message["headers"]["id"])
            process.run(lambda message=message: self._carry_out(message), str(message["headers"]["task"]))  # type: ignore[misc]

    def _carry_out(self, message: dict[str, Any]) -> None:
        headers = message["headers"]
        args, kwargs, _ = json.loads(message["body"])
        task = APP.tasks[headers["task"]]
        request = {**headers, "delivery_info": {}, "hostname": self.name, "args": args, "kwargs": kwargs}
        try:
            build_tracer(task.name, task, app=APP)(headers["id"], args, kwargs, request)
        except RedisError:
            if not this_node().has_left:  # else no result counts, and a store that is away is not waited for
                raise
