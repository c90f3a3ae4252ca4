"""An API node in virtual time: the worker's own node, task, times and repeats.

Only the exchange itself is made up. The URL of a call says what the API does: it takes `work_s`, and answers each try by the next status of
`answers`; 0 breaks the connection.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import Any
from urllib.parse import unquote

import httpx

from app.action_task import Call
from app.broker.memory_store import MemoryStore
from tangram import clock
from tangram.blobs import Blobs
from tangram.wire import WireNode
from tests.virtual.api import RETRY_AFTER_S, URL, Api
from tests.virtual.node import VirtualNode
from workers.api import requests, tasks
from workers.api.requests import Answer, Outgoing, Requests
from workers.context import ApiContext, provide
from workers.control import this_node
from workers.start import describe

TRAVEL_S = 0.02
"""The most that a connection takes, and then a request: what the margin of a rate makes up for."""


class Exchange(Requests):
    """One request of a worker, as `Requests` and `Pending` are to the task. It runs in a thread of its own, not in a loop."""

    def __init__(self, api: Api, call: Call, outgoing: Outgoing, on_sent: Callable[[], None]) -> None:
        self._api, self._call, self._stopped, self._ends_at, self._tries = api, call, clock.event(), 0.0, 0
        self._asked = json.loads(unquote(outgoing.url.removeprefix(URL)))
        self._future: Future[Answer] = Future()
        clock.thread(lambda: self._run(outgoing, on_sent), "request").start()

    def result(self) -> Answer:
        """Wait for the answer."""
        clock.wait([self._future])
        return self._future.result()

    def cancel(self) -> None:
        """Call it off."""
        self._stopped.set()

    def _run(self, outgoing: Outgoing, on_sent: Callable[[], None]) -> None:
        try:
            self._send(outgoing, on_sent).send(None)
        except StopIteration as done:
            self._future.set_result(done.value)
        except Exception as error:
            self._future.set_exception(error)

    async def _once(self, outgoing: Outgoing, trace: Callable[[str, object], Awaitable[None]]) -> Answer:
        random, tries = self._api.world.random, self._tries
        self._ends_at, self._tries = self._ends_at or clock.monotonic() + outgoing.timeout_s, tries + 1
        self._wait(random.random() * TRAVEL_S)
        await trace(requests._GOES_OUT, None)
        self._wait(random.random() * TRAVEL_S)
        earlier = sum(one.action == self._call.id for one in self._api.arrivals)
        with self._api.takes(self._call, this_node().name, "web", self._asked["work_s"], is_repeat=tries > 0):
            self._wait(self._asked["work_s"])
        status = self._asked["answers"][min(earlier, len(self._asked["answers"]) - 1)]
        if not status:
            raise httpx.ReadError("the connection broke")
        if status == 429:
            self._api.refused_at.append(self._api.world.now)
        return Answer(status, {"retry-after": f"{RETRY_AFTER_S:g}"} if status == 429 else {}, b"", truncated=False)

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(min(seconds, max(0.0, self._ends_at - clock.monotonic()))):
            raise CancelledError
        if clock.monotonic() >= self._ends_at:
            raise TimeoutError


class VirtualRequests(Requests):
    """Sends requests to the API."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def send(self, outgoing: Outgoing, on_sent: Callable[[], None] = lambda: None) -> Any:
        """Begin a request of the task that runs."""
        return Exchange(self._api, this_node().call(tasks.call.request.id), outgoing, on_sent)


class VirtualApiNode(VirtualNode):
    """A node that calls the API."""

    def prepare(self, worker: str) -> tuple[WireNode, Callable[[], dict[str, Any]]]:
        """Return what the node is, and what says how it is now."""
        settings = self.settings.model_copy(update={"node_name": self.name})
        blobs = Blobs(MemoryStore(self._network.broker), patience_s=math.inf)  # type: ignore[arg-type]
        provide(ApiContext(settings=settings, blobs=blobs, requests=VirtualRequests(self._network.api)))
        return describe("api", settings), dict
