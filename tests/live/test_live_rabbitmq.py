"""A deployment on servers: RabbitMQ as the broker, Redis for results, PostgreSQL for the journal."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from app.journal.database import open_engine
from app.journal.migrating import upgrade
from app.journal.status import status
from app.local.processes import Command, Process, wait_until
from tangram import Client, Settings
from tests.broker.conftest import rabbitmqctl, vhost_url
from tests.cli.template import PROGRAM
from tests.conftest import RedisUrls
from tests.live.support import ForkedProcess
from tests.live.test_live_loss import mark, words
from tests.sql.conftest import postgres_url

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
