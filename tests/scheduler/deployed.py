"""Schedulers over a broker in memory and a journal, on a clock that is set by hand, as clients and nodes see them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery
from redis import RedisError

from app.broker.memory import use
from app.broker.memory_store import MemoryBroker
from app.broker.stored_ends import stored_end
from app.broker.transport import KombuTransport
from scheduler.core.core import Core
from scheduler.live.entries import ActionEnded, Entry, Unfinished
from scheduler.live.heartbeats import HOUSEKEEPING_S
from scheduler.live.service import Service
from scheduler.live.transport import Received
from scheduler.model import Limits, QuotaSpec, commands, events
from scheduler.policies import make_policy
from tangram.wire import ACTION_HEADER, CONTROL_QUEUE, EVENTS_QUEUE, GRANT_HEADER, INGRESS_QUEUE, RESULT_KEY_PREFIX, node_queue

NODE: dict[str, Any] = {"name": "n", "kinds": ["cpu"], "labels": [], "cores": 8, "memory_mb": 1000, "cells": 0, "cell_memory_mb": 0}
NODE |= {"incarnation": "1", "running": [], "environments": []}
BEAT_S = 1.0
MESSAGE = '{"body": "W10=", "headers": {"id": "a"}, "properties": {"content_type": "application/json", "content_encoding": "utf-8"}}'


class Transport(KombuTransport):
    """A transport that waits for nothing: what is to come has been sent before."""

    def receive(self, timeout_s: float) -> list[Received]:
        return super().receive(0.0)


class Broker(MemoryBroker):
    """A broker, and a result store."""

    def __init__(self) -> None:
        super().__init__()
        self.app = use(Celery(set_as_current=False), self)
        self.app.conf.result_backend_transport_options = {"retry_policy": {"max_retries": 0}}  # as a scheduler has it

    def transport(self, epoch: int, **shards: int) -> Transport:
        """Return that of the scheduler of an epoch."""
        return Transport(self.app, connect_timeout_s=1.0, epoch=epoch, **shards)

    def submit(self, action_id: str, header: Mapping[str, Any]) -> None:
        """Send an action."""
        self.send(INGRESS_QUEUE, [[], {}, {}], {"id": action_id, "task": header["kind"], ACTION_HEADER: header})

    def report(self, *reports: object) -> None:
        """Send reports of a node in one message."""
        self.send(EVENTS_QUEUE, {"events": list(reports)})

    def request(self, body: object) -> None:
        """Send a control request."""
        self.send(CONTROL_QUEUE, body)

    def send(self, queue: str, body: object, headers: dict[str, Any] | None = None) -> None:
        """Send anything."""
        with self.app.connection_for_write() as connection:
            connection.Producer(serializer="json").publish(body, exchange="", routing_key=queue, headers=headers)

    def is_done(self) -> bool:
        """Say whether everything that was sent to the scheduler is acknowledged."""
        queues = (INGRESS_QUEUE, EVENTS_QUEUE, CONTROL_QUEUE)
        self.put_back("", queues)
        return not any(map(self.waiting, queues))

    def grants(self, node: str = "n") -> list[tuple[str, int]]:
        """Return the actions that wait for a node, and the numbers of their tries."""
        headers = [json.loads(message)["headers"] for message in self.waiting(node_queue(node))]
        return [(one["id"], one[GRANT_HEADER]["attempt"]) for one in headers if GRANT_HEADER in one]

    def orders(self, node: str = "n") -> list[tuple[str, str]]:
        """Take the orders that a node has got, control tasks and the ids or services that they name; its actions go with them."""
        messages = list(map(json.loads, iter(lambda: self.pop(node_queue(node)), None)))
        found = [(one["headers"]["task"], json.loads(one["body"])[1]) for one in messages]
        return [(task, str(arguments.get("id", arguments.get("service")))) for task, arguments in found if task.startswith("tangram.")]

    def end(self, action_id: str) -> tuple[str, str] | None:
        """Return how an action has ended as its client is told, and the cause."""
        end = stored_end(action_id, "my.task", self.value(RESULT_KEY_PREFIX + action_id))
        return None if end is None else (end.status, end.cause)


class Written:
    """A journal of what is written; one that `is_full` takes nothing. A scheduler before this one has `left` something."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.is_full, self.left = False, Unfinished(actions=[], environments=[], nodes=[])

    def write(self, entries: Sequence[Entry]) -> None:
        if self.is_full:
            raise OSError("no space left on device")
        self.entries += entries

    def unfinished(self) -> Unfinished:
        return self.left

    def has_ended(self, action_id: str) -> bool:
        return any(isinstance(entry, ActionEnded) and entry.end.id == action_id for entry in self.entries)


class Deployment:
    """Schedulers, one after another, and nodes that do what a test says."""

    def __init__(self, journal: Any = None, now: float = 1000.0, **shards: int) -> None:
        """Begin at `now`. With `shard` and `shards`, all are of one of several shards."""
        self.journal: Any = Written() if journal is None else journal
        self.shards = shards
        self.broker, self.now, self.epoch, self.leads = Broker(), now, 0, True
        self.nodes: dict[str, dict[str, Any]] = {}
        self.out: list[commands.Command] = []
        """What the cores have decided."""
        self.looks = 0
        """How often schedulers have looked at their lease."""

    def start(self, policy: str = "fcfs", quotas: Sequence[QuotaSpec] = (), make: Callable[..., Core] = Core, **limits: Any) -> None:
        """Begin with a scheduler that knows nothing but the journal. The nodes have carried out the orders of the one before."""
        self.epoch += 1
        for name in self.nodes:
            self.broker.orders(name)
        self.core, self.transport = (
            make(make_policy(policy), limits=Limits(**limits), quotas=quotas),
            self.broker.transport(self.epoch, **self.shards),
        )
        same = {"epoch": self.epoch, "clock": lambda: self.now, "still_leading": self._leads, "event_log": self}
        self.service = Service(self.core, self.transport, self.journal, **same, **self.shards)
        self.service.recover()

    def _leads(self) -> bool:
        self.looks += 1
        return self.leads

    def handled(self, event: events.Event, now: float, out: Sequence[commands.Command]) -> None:
        """Take note of a decision, as an event log does."""
        self.out += out

    def flush(self) -> None:
        """Have nothing to write."""

    def of(self, sort: type[Any]) -> list[Any]:
        """Return the commands of one sort so far."""
        return [command for command in self.out if isinstance(command, sort)]

    def ends(self) -> dict[str, tuple[str, bool]]:
        """Return of each action that has ended how, and whether its worker has stored that."""
        return {end.id: (end.status, end.by_worker) for end in self.of(commands.Finish)}

    def states(self) -> list[tuple[str, str]]:
        """Return the states that nodes went through, each with its reason."""
        return [(note.state, note.reason) for note in self.of(commands.NoteNode)]

    @property
    def running(self) -> list[str]:
        return list(self.core.state.running)

    @property
    def waiting(self) -> list[str]:
        return list(self.core.state.waiting)

    def wait(self, seconds: float) -> None:
        """Go on for so many seconds, in which nothing comes."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + HOUSEKEEPING_S)
            self.service.step()

    def told(self, *reports: object) -> None:
        self.broker.report(*reports)
        self.service.step()

    def asked(self, request: object) -> None:
        self.broker.request(request)
        self.service.step()

    def join(self, name: str = "n", **spec: Any) -> None:
        """Let a worker begin."""
        self.nodes[name] = {**NODE, "name": name, **spec}
        self.told({"type": "joined", "node": self.nodes[name]})

    def beat(self, *running: str, node: str = "n", environments: Sequence[str] = (), **spec: Any) -> None:
        """Let a node beat, a second after what was before."""
        self.now += 1.0
        self.nodes[node] = {**self.nodes.get(node, {**NODE, "name": node}), **spec}
        self.told({"type": "beat", "node": {**self.nodes[node], "running": list(running), "environments": list(environments)}})

    def send(self, *ids: str, kind: str = "my.task", cost: Any = None, **header: Any) -> None:
        """Send actions, of one core unless told otherwise."""
        for one in ids:
            self.broker.submit(one, {"kind": kind, "cost": {"cores": 1} if cost is None else cost, "submitted_at": self.now, **header})

    def submit(self, *ids: str, **header: Any) -> None:
        self.send(*ids, **header)
        self.service.step()

    def open(self, environment: str, *, finish: bool = True, job: str = "default", trajectory: str = "", **cost: int) -> None:
        """Open an environment, and have that succeed if it begins at once."""
        self.submit(f"open-{environment}", kind="cpu.open", environment=environment, job=job, trajectory=trajectory, cost=cost)
        if finish and f"open-{environment}" in self.running:
            self.finish(f"open-{environment}")

    def exec(self, action_id: str, environment: str) -> None:
        self.submit(action_id, kind="cpu.exec", environment=environment)

    def close(self, environment: str, *, finish: bool = False, job: str = "default") -> None:
        self.submit(f"close-{environment}", kind="cpu.close", environment=environment, job=job, cost={})
        if finish:
            self.finish(f"close-{environment}")

    def finish(self, *ids: str, status: str = "succeeded") -> None:
        self.told(*(self.finished(one, status=status) for one in ids))

    def finished(self, action_id: str, **fields: Any) -> dict[str, Any]:
        """Return the report of an end."""
        running = self.core.state.running.get(action_id)
        return {"type": "finished", "id": action_id, "attempt": running.grant.attempt if running else 1, "status": "succeeded", **fields}

    def stored(self, **results: object) -> None:
        """Have workers store results; errors are failures."""
        for action_id, result in results.items():
            self.broker.app.backend.store_result(action_id, result, "FAILURE" if isinstance(result, Exception) else "SUCCESS")

    def away(self, prefix: str = RESULT_KEY_PREFIX) -> None:
        """Have the result store refuse keys that begin so, until it is `back`."""

        def refuse(operation: str, name: str) -> None:
            if name.startswith(prefix):
                raise RedisError("away")

        self.broker.called = refuse

    def back(self) -> None:
        self.broker.called = lambda operation, name: None


class Cluster(Deployment):
    """A scheduler, and nodes that beat when told."""

    def __init__(self, *names: str, policy: str = "fcfs", node_lost_s: float = 0.0, **spec: Any) -> None:
        super().__init__()
        self.start(policy, beat_s=BEAT_S, node_lost_s=node_lost_s)
        for name in names or ("n",):
            self.join(name, **spec)

    def lose(self, name: str) -> None:
        """Have a node silent for too long, while the others beat."""
        while name in self.core.state.nodes:
            self.wait(BEAT_S)

    def granted(self, action_id: str) -> tuple[str, int]:
        grant = self.core.state.running[action_id].grant
        return grant.node, grant.attempt

    def ended(self, *nodes: str) -> list[tuple[str, str, str]]:
        """Return the orders that nodes have got to end something."""
        told = ("tangram.tell", "tangram.regrant")
        return [(node, *order) for node in nodes for order in self.broker.orders(node) if order[0] not in told]
