"""Three brokers with their result stores behind one fixture: memory, Redis, and RabbitMQ with Redis."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Message

from app.broker.memory import SCHEME, use
from app.broker.memory_store import BrokenConnection, MemoryBroker, MemoryStore
from app.broker.transport import KombuTransport
from app.local.processes import wait_until
from app.scheduler_process import _app_of
from scheduler.live.transport import Received
from tangram import Settings
from tangram.connection import Link, find_link
from tangram.session import Session
from tangram.wire import CONTROL, EVENTS, INGRESS, direct_queue, node_queue, of_shard
from tests.conftest import RedisServer, running_redis
from tests.needed import needed

CALLBACKS = direct_queue("callbacks")
NODE = direct_queue(node_queue("n"))
MOST_SHARDS = 3
BROKER_CALLS = {"connect", "put", "put done", "pop", "take", "acknowledge"}
"""What `MemoryBroker.called` is told of the broker; all else is told of the result store."""


class Stack:
    """A broker and a result store. What stands behind them is `name`."""

    name: str
    rescues = True
    """Whether a living transport of an earlier epoch loses what it took, see the table in docs/architecture.md."""

    app: Celery
    store: Any
    link: Callable[[], Link]
    """Returns a client's way to both."""
    cut: Callable[[], None]
    """Breaks all connections. Broker and store go on."""
    away: Callable[[str], contextlib.AbstractContextManager[None]]
    """Has the `broker` or the `store` refuse connections for a while; it forgets everything meanwhile."""
    put_bytes: Callable[[str, bytes], None]
    """Puts what kombu did not write into a queue."""

    def __init__(self) -> None:
        self.ends = contextlib.ExitStack()

    def open(self, epoch: int = 1, **shards: int) -> KombuTransport:
        """Return the transport of a scheduler."""
        transport = KombuTransport(self.app, connect_timeout_s=5.0, epoch=epoch, **shards)
        self.ends.callback(transport.close)
        return transport

    def session(self, shards: int = 1, connect_timeout_s: float = 30) -> Session:
        """Return a client's session that has reached both."""
        session = Session("default", Settings(connect_timeout_s=connect_timeout_s, shards=shards), link=self.link())
        self.ends.callback(session.stop)
        for ready in session.start():
            ready.result(60)
        return session

    def put(self, queue: Any, *bodies: object, **options: Any) -> None:
        """Send bodies to a queue."""
        with self.app.connection_for_write() as connection:
            queue(connection.default_channel).declare()
            for body in bodies:
                connection.Producer(serializer="json").publish(body, exchange="", routing_key=queue.name, **options)

    def put_actions(self, *ids: str, queue: Any = INGRESS) -> None:
        """Send plain tasks as actions."""
        for action_id in ids:
            self.put(queue, [[], {}, {}], headers={"id": action_id, "task": "my.task"})

    def taken(self, queue: Any, count: int) -> list[Message]:
        """Return and remove what waits in a queue, once there are `count` messages or more."""
        found: list[Message] = []
        with self.app.connection_for_read() as connection:
            bound = queue(connection.default_channel)
            bound.declare()

            def enough() -> bool:
                found.extend(iter(lambda: bound.get(no_ack=True, accept=["json"]), None))
                return len(found) >= count

            assert wait_until(enough, 60), found
        return found


class Memory(Stack):
    name = "memory"

    def __init__(self, state_dir: Path) -> None:
        super().__init__()
        self._away: set[str] = set()
        self.broker = MemoryBroker(self._called)
        self.app, self.store = use(_app_of(Settings(state_dir=state_dir)), self.broker), MemoryStore(self.broker)

    def _called(self, operation: str, name: str) -> None:
        if ("broker" if operation in BROKER_CALLS else "store") in self._away:
            raise BrokenConnection("it is away")

    def link(self) -> Link:
        app = use(Celery("client", broker=f"{SCHEME}://", backend="disabled://", set_as_current=False), self.broker)
        return Link(app, MemoryStore(self.broker), "memory")  # type: ignore[arg-type]

    def cut(self) -> None:
        self.broker.restart(keeps=True)

    @contextlib.contextmanager
    def away(self, part: str) -> Iterator[None]:
        self._away.add(part)
        self.broker.restart(keeps=False)
        yield
        self._away.clear()

    def put_bytes(self, queue: str, data: bytes) -> None:
        self.broker.put(queue, data)


class OnRedis(Stack):
    name = "redis"

    def __init__(self, broker_url: str, servers: dict[str, RedisServer]) -> None:
        super().__init__()
        self._servers = servers
        self._settings = Settings(broker_url=broker_url, result_url=servers["store"].result, connect_timeout_s=5.0)
        self.app = _app_of(self._settings)
        self.store = self.ends.enter_context(servers["store"].client())
        for server in servers.values():
            with server.client() as client:
                client.flushall()

    def link(self) -> Link:
        return find_link(self._settings)

    def cut(self) -> None:
        for server in self._servers.values():
            with server.client() as client:
                for kind in ("normal", "pubsub"):
                    client.client_kill_filter(_type=kind, skipme=True)

    @contextlib.contextmanager
    def away(self, part: str) -> Iterator[None]:
        self._servers[part].stop()
        yield
        self._servers[part].start()

    def put_bytes(self, queue: str, data: bytes) -> None:
        with self._servers["broker"].client() as client:
            client.lpush(queue, data)


class OnRabbitMQ(OnRedis):
    name, rescues = "rabbitmq", False

    def __init__(self, broker_url: str, servers: dict[str, RedisServer]) -> None:
        super().__init__(broker_url, {"store": servers["store"]})
        with self.app.connection_for_write() as connection:
            for queue in (INGRESS, EVENTS, CONTROL, NODE):
                for shard in range(MOST_SHARDS):
                    # With it goes what was not acknowledged.
                    connection.default_channel.queue_delete(of_shard(queue.name, shard))
            # Celery declares this one once in a process.
            CALLBACKS(connection.default_channel).declare()
            connection.default_channel.queue_purge(CALLBACKS.name)

    def cut(self) -> None:
        super().cut()
        rabbitmqctl("close_all_connections", "--vhost", str(self.app.conf.broker_url).rpartition("/")[2], "test")

    def put_bytes(self, queue: str, data: bytes) -> None:
        with self.app.connection_for_write() as connection:
            channel = connection.default_channel
            channel.basic_publish(channel.prepare_message(data), exchange="", routing_key=queue)


def rabbitmqctl(*words: str) -> None:
    """Have the RabbitMQ server of this machine do something."""
    control = shutil.which("rabbitmqctl")
    needed("" if control else "no rabbitmqctl: install RabbitMQ")
    done = subprocess.run([str(control), *words], capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        needed(f"no RabbitMQ that takes orders: {done.stderr.strip() or done.stdout.strip()}")


@pytest.fixture(scope="package")
def vhost_url() -> Iterator[str]:
    """Return the address of an empty virtual host."""
    name = f"tangram-broker-{uuid4().hex[:8]}"
    rabbitmqctl("add_vhost", name)
    try:
        rabbitmqctl("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        yield f"amqp://guest:guest@127.0.0.1:5672/{name}"
    finally:
        rabbitmqctl("delete_vhost", name)


@pytest.fixture(scope="package")
def servers() -> Iterator[dict[str, RedisServer]]:
    """Run two Redis servers that a test may stop and start again."""
    with running_redis() as broker, running_redis() as store:
        yield {"broker": broker, "store": store}


@pytest.fixture(params=["memory", "redis", pytest.param("rabbitmq", marks=pytest.mark.real)])
def stack(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """Return one of the three, empty."""
    monkeypatch.setattr("app.broker.redis_intake.RESCUE_S", 0.1)
    monkeypatch.setattr("app.broker.transport._LONGEST_PAUSE_S", 0.1)
    made: Stack
    if request.param == "memory":
        made = Memory(tmp_path)
    else:
        servers = request.getfixturevalue("servers")
        if request.param == "redis":
            made = OnRedis(servers["broker"].broker, servers)
        else:
            made = OnRabbitMQ(request.getfixturevalue("vhost_url"), servers)
    with made.app, made.ends:
        yield made


def take(transport: KombuTransport, enough: Callable[[list[Received]], object], *, keep: bool = False) -> list[Received]:
    """Receive until it is enough; acknowledge, unless to `keep` it unacknowledged."""
    found: list[Received] = []

    def more() -> object:
        batch = transport.receive(0.1)
        if not keep:
            transport.flush(batch)
        found.extend(batch)
        return enough(found)

    assert wait_until(lambda: bool(more()), 60), found
    return found
