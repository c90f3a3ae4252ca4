"""A deployment on servers: RabbitMQ as the broker, Redis for results, PostgreSQL for the journal."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from app.journal.database import open_engine
from app.journal.migrating import upgrade
from app.journal.status import status
from app.local.processes import Command, Process, wait_until
from app.preconditions import require_broker
from app.scheduler_process import _app_of, transport_of
from tangram import Action, Client, Settings
from tangram.connection import open_store
from tangram.errors import StackUnreachable, Unknown
from tangram.session import Session
from tests.broker.conftest import rabbitmqctl, vhost_url
from tests.certificates import make_certificates
from tests.cli.template import PROGRAM
from tests.conftest import RedisUrls
from tests.live.network import BlockingNetwork, tls_before
from tests.live.support import ForkedProcess
from tests.live.test_live_loss import mark, words
from tests.nodes import DESCRIPTION
from tests.sql.conftest import postgres_url
from workers.node import Node

__all__ = ["postgres_url", "vhost_url"]

pytestmark = pytest.mark.real


def test_a_deployment_on_servers_survives_cut_connections(vhost_url: str, postgres_url: str, redis_urls: RedisUrls, tmp_path: Path) -> None:
    upgrade(postgres_url)
    with ExitStack() as stack:
        folder = str(tmp_path / "state")
        urls = {"broker_url": vhost_url, "result_url": redis_urls.result, "database_url": postgres_url, "state_dir": folder}
        variables = {f"TANGRAM_{name.upper()}": value for name, value in urls.items()}
        env = {**os.environ, **variables, "TANGRAM_CORES": "2", "TANGRAM_TAKEOVER_S": "1.5", "TANGRAM_NODE_NAME": "cpu-0"}
        processes = list[Process]()

        def start(name: str, *argv: str) -> Process:
            command = Command(name, (*PROGRAM, *argv))
            processes.append(ForkedProcess(command, log=tmp_path / f"{name}-{len(processes)}.log", env=env))
            stack.callback(processes[-1].stop, 10)
            return processes[-1]

        scheduler = start("scheduler", "scheduler")
        start("cpu-0", "worker", "cpu", "--include", "tests.live.live_tasks")
        engine = open_engine(postgres_url)
        stack.callback(engine.dispose)
        up = wait_until(lambda: [node.state for node in status(engine, 0.0).nodes] == ["up"], 60)
        assert up, "\n".join(line for process in processes for line in process.log_tail(15))
        marks = tmp_path / "marks"
        with Client(settings=Settings(**urls)) as client, client.open(trajectory="t") as environment:  # type: ignore[arg-type]
            assert environment.exec("echo hello").stdout == "hello\n"
            # When the broker cuts all connections, and the scheduler is killed, while work comes in
            handles = [client.submit(mark(marks, f"w{number}")) for number in range(30)]
            rabbitmqctl("close_all_connections", "--vhost", vhost_url.rpartition("/")[2], "test")
            handles += [client.submit(mark(marks, f"w{number}")) for number in range(30, 45)]
            psutil.Process(scheduler.identity.pid).kill()
            handles += [client.submit(mark(marks, f"w{number}")) for number in range(45, 60)]
            assert wait_until(scheduler.ended, 60)
            start("scheduler", "scheduler")
            # Then all end, each has run once, and the environment still stands
            assert [handle.result(60) for handle in handles] == [f"w{number}" for number in range(60)]
            assert environment.exec("echo still").stdout == "still\n"
        assert words(marks) == {f"w{number}": 1 for number in range(60)}
        for process in processes:
            # Celery itself says with a traceback that it found one more connection cut when it let go of all.
            said = re.sub(r"Error cleaning up after event loop.*?(?=^\[|\Z)", "", process.log.read_text(), flags=re.DOTALL | re.MULTILINE)
            assert "Traceback" not in said and "guest:guest" not in said


def test_a_broker_that_takes_no_messages_is_away(vhost_url: str, redis_urls: RedisUrls) -> None:
    with closing(BlockingNetwork(5672)) as network:
        url = vhost_url.replace(":5672", f":{network.port}")
        settings = Settings(broker_url=url, result_url=redis_urls.result, outage_s=1.0)
        # Given a client whose broker lacks memory; then it waits no longer than for one that is gone, on one connection
        session = Session("default", settings)
        for ready in session.start():
            ready.result(60)
        network.flows.clear()
        with pytest.raises(Unknown, match="takes no messages"):
            session.submit(Action(kind="my.task")).result(60)
        assert network.blocked == 1
        network.flows.set()
        later = session.submit(Action(kind="my.task"))
        assert wait_until(lambda: session.is_with_broker(later.id), 60)
        # Given a scheduler that sends nothing, and a node
        transport = transport_of(settings, _app_of(settings), 1)
        node = Node(_app_of(settings), open_store(redis_urls.result, 30.0), DESCRIPTION, beat_s=0.2, usage_s=9.0, timeout_s=9.0)
        node.join()

        def beats() -> bool:
            received = transport.receive(0.1)
            transport.flush(received)
            bodies = [message.body for message in received if message.sort == "events"]
            return any(event["type"] == "beat" for body in bodies for event in body["events"])

        assert wait_until(beats, 60)
        # When the broker lacks memory; then the scheduler does not take the nodes for silent, and afterwards all goes on
        network.flows.clear()
        assert wait_until(lambda: transport.receive(0.1) == [] and not transport.caught_up, 60)
        network.flows.set()
        assert wait_until(beats, 60)
        for end in (node.leave, session.stop, transport.close):
            end()


def test_a_broker_over_tls_is_used_where_its_authority_is_known_and_nowhere_else(
    vhost_url: str, redis_urls: RedisUrls, tmp_path: Path
) -> None:
    make_certificates(tmp_path, "127.0.0.1")
    with tls_before(5672, tmp_path) as port:
        address = vhost_url.replace("amqp:", "amqps:").replace(":5672", f":{port}")
        # Given a broker behind TLS, a scheduler, a node and a client that know who has signed its certificate
        knowing = Settings(broker_url=f"{address}?ssl_ca_certs={tmp_path}/ca.pem", result_url=redis_urls.result)
        transport, session = transport_of(knowing, _app_of(knowing), 1), Session("default", knowing)
        node = Node(_app_of(knowing), open_store(redis_urls.result, 30.0), DESCRIPTION, beat_s=0.2, usage_s=9.0, timeout_s=9.0)
        node.join()
        for ready in session.start():
            ready.result(60)
        session.submit(Action(kind="my.task"))
        sorts = set[str]()

        def has_both() -> bool:
            received = transport.receive(0.1)
            sorts.update(message.sort for message in received)
            transport.flush(received)
            return {"events", "action"} <= sorts

        # Then all of them talk over it
        assert wait_until(has_both, 60)
        # And who does not know the authority, or is told another name of the host, does not
        for url in (address, f"{address}?ssl_ca_certs={tmp_path}/ca.pem".replace("127.0.0.1", "localhost")):
            with pytest.raises(StackUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
                require_broker(_app_of(Settings(broker_url=url, result_url=redis_urls.result)), 5.0)
        for end in (node.leave, session.stop, transport.close):
            end()
