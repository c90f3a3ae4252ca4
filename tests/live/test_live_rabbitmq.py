"""A deployment on servers: RabbitMQ as the broker, Redis for results, PostgreSQL for the journal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import SQLAlchemyError

from app.journal.database import open_engine
from app.journal.migrating import upgrade
from app.journal.status import status
from app.local.processes import Command, Process, wait_until
from tangram import Action, Client, Cost, Settings
from tests.broker.conftest import missing, rabbitmqctl, vhost_url
from tests.live.test_live_loss import words

__all__ = ["vhost_url"]

pytestmark = pytest.mark.real

POSTGRES = os.environ.get("TANGRAM_TEST_POSTGRES_URL", "postgresql+psycopg://postgres@127.0.0.1:5432")


@pytest.fixture
def database_url() -> Iterator[str]:
    """Return the URL of an empty, migrated database."""
    name = f"tangram_live_{uuid4().hex[:8]}"
    server = create_engine(make_url(POSTGRES).set(database="postgres"), isolation_level="AUTOCOMMIT", connect_args={"connect_timeout": 60})
    try:
        with server.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
    except SQLAlchemyError as error:
        missing(f"no PostgreSQL at {POSTGRES}: {str(error).splitlines()[0]}")
    url = make_url(POSTGRES).set(database=name).render_as_string(hide_password=False)
    try:
        upgrade(url)
        yield url
    finally:
        with server.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
        server.dispose()


def test_a_deployment_on_servers_survives_cut_connections(vhost_url: str, database_url: str, redis_urls: object, tmp_path: Path) -> None:
    urls = {
        "TANGRAM_BROKER_URL": vhost_url,
        "TANGRAM_RESULT_URL": redis_urls.result,  # type: ignore[attr-defined]
        "TANGRAM_DATABASE_URL": database_url,
        "TANGRAM_STATE_DIR": str(tmp_path / "state"),
    }
    env = {**os.environ, **urls, "TANGRAM_CORES": "2", "TANGRAM_TAKEOVER_S": "1.5", "TANGRAM_NODE_NAME": "cpu-0"}

    def start(name: str, *argv: str) -> Process:
        return Process(Command(name, (sys.executable, "-m", "tangram", *argv)), log=tmp_path / f"{name}.log", env=env)

    engine = open_engine(database_url)
    processes = [start("scheduler", "scheduler"), start("cpu-0", "worker", "cpu", "--include", "tests.live.live_tasks")]
    try:

        def until(condition: object, timeout_s: float = 60) -> None:
            done = wait_until(lambda: bool(condition()), timeout_s)  # type: ignore[operator]
            assert done, "\n".join(line for process in processes for line in process.log_tail(15))

        until(lambda: [node.state for node in status(engine, 0.0).nodes] == ["up"])
        settings = Settings(
            broker_url=urls["TANGRAM_BROKER_URL"],
            result_url=urls["TANGRAM_RESULT_URL"],
            database_url=database_url,
            state_dir=tmp_path / "state",
        )
        marks = tmp_path / "marks"
        with Client(settings=settings) as client, client.open(trajectory="t") as env_:
            assert env_.exec("echo hello").stdout == "hello\n"

            def mark(number: int) -> Action:
                arguments = {"path": str(marks), "word": f"w{number}", "until": ""}
                return Action(kind="live.mark", cost=Cost.of(cores=1)).with_arguments(**arguments)

            # When the broker cuts all connections, and the scheduler is killed, while work comes in
            handles = [client.submit(mark(number)) for number in range(60)]
            rabbitmqctl("close_all_connections", "--vhost", vhost_url.rpartition("/")[2], "test")
            handles += [client.submit(mark(number)) for number in range(60, 90)]
            psutil.Process(processes[0].identity.pid).kill()
            handles += [client.submit(mark(number)) for number in range(90, 120)]
            until(lambda: processes[0].ended())
            processes[0].stop(0.0)
            processes[0] = start("scheduler", "scheduler")
            # Then all end, each has run once, and the environment still stands
            assert [handle.result(60) for handle in handles] == [f"w{number}" for number in range(120)]
            assert env_.exec("echo still").stdout == "still\n"
        assert words(marks) == {f"w{number}": 1 for number in range(120)}
        for process in processes:
            assert "Traceback" not in process.log.read_text()
            assert "guest:guest" not in process.log.read_text()
    finally:
        for process in reversed(processes):
            process.stop(10)
        engine.dispose()
