"""Services on a live stack: what status says of them, a services file that changes, a worker that dies, a restore by order."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.journal.database import open_engine
from app.journal.status import ServiceStatus, status
from tangram import calls
from tangram.errors import ActionError
from tests.live.support import Live

ITEM = [{"prompt": "p", "response": "r"}]
TWO = """
[services.judge]
engine = "stub"
task = "score"
memory_mb = {memory_mb}

[services.{other}]
engine = "stub"
task = "score"
memory_mb = 700
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a services file of `judge` and `other`, of which one fits on a cell of 1000 MB at a time."""
    path = tmp_path / "services.toml"
    path.write_text(TWO.format(memory_mb=600, other="other"))
    return path


@pytest.fixture
def gpus(own_stack: Callable[..., Live], file: Path) -> Live:
    """Run a stack with one cell of 1000 MB."""
    return own_stack(nodes=0, api_nodes=0, cells=1, cell_memory_mb=1000, services_file=file)


def services(live: Live) -> dict[str, ServiceStatus]:
    engine = open_engine(live.stack.database_url)
    try:
        return {service.name: service for service in status(engine, time.time()).services}
    finally:
        engine.dispose()


def states(live: Live) -> dict[str, list[str]]:
    return {name: [found.state for found in service.instances] for name, service in services(live).items()}


def test_status_follows_the_life_of_services_and_says_so_of_a_lost_node(gpus: Live) -> None:
    # Given two services that take turns on one cell
    assert states(gpus) == {"judge": [], "other": []}
    with gpus.client() as client:
        first = client.score("judge", ITEM)
        client.score("other", ITEM)
        gpus.until(lambda: states(gpus) == {"judge": ["host"], "other": ["resident"]})
        assert client.score("judge", ITEM) == first
    # When the first is back, then status has its counts
    gpus.until(lambda: states(gpus) == {"judge": ["resident"], "other": ["host"]})
    (found,) = services(gpus)["judge"].instances
    assert (found.node, found.cells, found.memory_mb) == ("gpu-0", (0,), 600.0)
    assert (found.starts, found.restores, found.evictions) == (1, 1, 1)
    assert services(gpus)["judge"].declared["gpu-0"]["memory_mb"] == 600.0
    # And when its worker stops, its rows say so; a new one has none of them
    os.kill(gpus.process("gpu-0").pid, signal.SIGKILL)
    gpus.until(lambda: states(gpus) in ({"judge": ["lost"], "other": ["lost"]}, {"judge": ["absent"], "other": ["absent"]}))


def test_a_services_file_that_changes_counts_without_a_restart(gpus: Live, file: Path) -> None:
    with gpus.client() as client:
        client.score("judge", ITEM)
        # When one service changes, one goes and one comes
        file.write_text(TWO.format(memory_mb=650, other="newcomer"))
        gpus.until(lambda: "newcomer" in services(gpus))
        # Then the changed one is stopped, and started anew when it is asked for
        gpus.until(lambda: states(gpus)["judge"] == ["absent"])
        client.score("judge", ITEM)
        gpus.until(lambda: [found.memory_mb for found in services(gpus)["judge"].instances] == [650.0])
        assert len(client.score("newcomer", ITEM)) == 1
        with pytest.raises(ActionError, match="service 'other' is not declared"):
            client.score("other", ITEM)
    # And a wrong file changes nothing, not even when the worker is told to read it
    refused = "the services file is refused"
    file.write_text("[services.judge")
    gpus.until(lambda: gpus.log("gpu-0").count(refused) == 1)
    os.kill(gpus.process("gpu-0").pid, signal.SIGHUP)
    gpus.until(lambda: gpus.log("gpu-0").count(refused) == 2)
    with gpus.client() as client:
        assert len(client.score("newcomer", ITEM)) == 1


def test_a_worker_has_a_thread_for_every_call_that_its_services_take_at_a_time(gpus: Live, file: Path) -> None:
    # Given a service that takes more calls than a worker has of anything else
    file.write_text(file.read_text().replace("memory_mb = 600", "memory_mb = 600\nmax_concurrency = 200"))
    gpus.until(lambda: services(gpus)["judge"].declared["gpu-0"]["max_concurrency"] == 200)
    # When so many come and none ends
    with gpus.client() as client:
        action = calls.score("default", "judge", ITEM, {})
        handles = [client.submit(replace(action, arguments={**action.arguments, "work_s": 300.0})) for _ in range(200)]
        # Then all are granted, and none waits in the worker for another to end: each can be cancelled at once
        gpus.until(lambda: [found.running for found in services(gpus)["judge"].instances] == [200])
        client.cancel(job="default")
        for handle in handles:
            with pytest.raises(ActionError):
                handle.result(30)


def test_a_service_is_restored_by_order_and_the_journal_has_how_that_ended(gpus: Live) -> None:
    def order(service: str, evict: list[dict[str, Any]]) -> None:
        from app.celery import make_app

        make_app(gpus.settings).send_task(
            "tangram.restore", kwargs={"service": service, "cell_ids": [0], "evict": evict}, queue="node.gpu-0"
        )

    order("judge", [])
    gpus.until(lambda: states(gpus)["judge"] == ["resident"])
    order("other", [{"service": "judge", "cell_ids": [0]}])
    gpus.until(lambda: states(gpus) == {"judge": ["host"], "other": ["resident"]})
    # A service that nobody declares cannot be; that is said, too
    order("nobody", [])
    gpus.until(lambda: states(gpus).get("nobody") == ["failed"])
    (found,) = services(gpus)["nobody"].instances
    assert "no service 'nobody' here" in found.reason
