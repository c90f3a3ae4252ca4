"""A GPU node in virtual time: the worker's own node and reporter. Its services are made up: instances that load, are evicted, and die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from app.action_task import ActionTask
from app.runtime import runtime
from tangram import clock
from tangram.errors import ActionCancelled, ActionFailed
from tangram.wire import WireNode
from tests.virtual.node import APP, VirtualNode
from tests.virtual.sandbox import Ledger
from workers.control import this_node
from workers.node import Node
from workers.start import describe

CELL_MB = 1000
SERVICES: dict[str, dict[str, Any]] = {
    "small": {"cells": [1], "memory_mb": 300, "restore_s": 0.2, "max_concurrency": 2},
    "middle": {"cells": [1], "memory_mb": 600, "restore_s": 0.5, "max_concurrency": 1},
    "large": {"cells": [1, 2], "memory_mb": 900, "restore_s": 2.0, "max_concurrency": 1},
}
DRAIN_S = 60.0
"""How long an eviction waits for calls."""

Name = tuple[str, tuple[int, ...]]


class Gpu:
    """The instances of one worker process."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.node: Node | None = None
        self.states: dict[Name, str] = {}
        self._users: dict[Name, int] = {}
        self._changed = clock.event()

    def now(self) -> dict[str, Any]:
        """Return what a beat says of services."""
        return {"services": SERVICES, "instances": [self._wire(*one) for one in self.states.items()]}

    @contextmanager
    def serving(self, name: Name, evict: list[Name]) -> Iterator[None]:
        """Evict instances, bring one onto its cells, and keep it there within the block."""
        for other in evict:
            self._evict(other)
        self._wait(lambda: self.states.get(name) != "starting")
        if self.states.get(name) != "resident":
            for other in [one for one in self.states if self._is_in_the_way(one, name)]:
                self._evict(other)
            self._say(name, "starting")
            clock.sleep(SERVICES[name[0]]["restore_s"])
            self._say(name, "resident")
        self._users[name] = self._users.get(name, 0) + 1
        try:
            yield
        finally:
            self._users[name] -= 1
            self._changed.set()

    def die(self, name: Name) -> None:
        """Have an instance end by itself."""
        if self.states.get(name) == "resident":
            self._say(name, "failed")

    def _is_in_the_way(self, other: Name, name: Name) -> bool:
        cells = set(other[1]) & set(name[1])
        booked = {cell: sum(SERVICES[one[0]]["memory_mb"] for one in self.states if one != name and cell in one[1]) for cell in cells}
        return other != name and any(mb + SERVICES[name[0]]["memory_mb"] > CELL_MB for mb in booked.values()) and not self._users.get(other)

    def _evict(self, name: Name) -> None:
        if name in self.states and self._wait(lambda: not self._users.get(name) and self.states.get(name) != "starting"):
            self._say(name, "absent")

    def _wait(self, condition: Callable[[], bool]) -> bool:
        until = clock.monotonic() + DRAIN_S
        while not condition():
            if clock.monotonic() >= until:
                raise ActionFailed("calls of an instance that is to go do not end", "worker_failed")
            self._changed.clear()
            self._changed.wait(1.0)
        return True

    def _say(self, name: Name, state: str) -> None:
        assert self.node is not None
        if state == "absent":
            self.states.pop(name, None)
        else:
            self.states[name] = state
        self.node.report({"type": "service", "node": self.node.name, **self._wire(name, state)})
        self._changed.set()

    @staticmethod
    def _wire(name: Name, state: str) -> dict[str, Any]:
        return {"service": name[0], "cell_ids": list(name[1]), "state": state}


class VirtualGpuNode(VirtualNode):
    """A node with `cores` GPU cells, and no core."""

    def prepare(self, worker: str) -> tuple[WireNode, Callable[[], dict[str, Any]]]:
        """Return what the node is, and what says how it is now."""
        self.gpu = gpu = Gpu(worker)
        runtime().provide(Gpu, gpu)
        settings = self.settings.model_copy(update={"node_name": self.name})
        return describe("gpu", settings, cells=self.cores, cell_memory_mb=CELL_MB, services=SERVICES), gpu.now

    def joins(self, node: Node) -> None:
        """Take note of the worker's node."""
        self.gpu.node = node


@APP.task(name="virtual.score", base=ActionTask, bind=True)  # type: ignore[untyped-decorator]
def score(self: ActionTask, service: str, work_s: float, dies: bool = False) -> str:
    """Ask an instance of a service, which may end by itself afterwards."""
    node, gpu = this_node(), runtime().part(Gpu)
    assert isinstance(node, Node) and gpu is not None
    call, stopped = node.call(self.request.id), clock.event()
    node.attach(call, lambda reason: stopped.set())
    name = (service, tuple(sorted(call.grant["cell_ids"])))
    with gpu.serving(name, [(one["service"], tuple(sorted(one["cell_ids"]))) for one in call.grant["evict"]]):
        run = runtime().part(Ledger).begin(call.id, worker=node.name)  # type: ignore[union-attr]
        if stopped.wait(work_s):
            raise ActionCancelled(call.cancel_reason, call.cancel_cause)
        run.outcome = "succeeded"
    if dies:
        gpu.die(name)
    return service
