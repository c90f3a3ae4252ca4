"""Services on a live stack: what status says of them, a services file that changes, a worker that dies."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.celery import make_app
from app.journal.status import ServiceStatus, status
from app.local.stack import StackPlan
from tangram import calls
from tangram.errors import ActionError
from tangram.wire import node_queue
from tests.live.support import FAST_BEATS, Live, running

pytestmark = pytest.mark.real

ITEM = [{"prompt": "p", "response": "r"}]


def table(name: str, memory_mb: int = 700, at_once: int = 1) -> str:
    return f'[services.{name}]\nengine = "stub"\ntask = "score"\nmemory_mb = {memory_mb}\nmax_concurrency = {at_once}\n'


def services(live: Live) -> dict[str, ServiceStatus]:
    """Return what status says of all services."""
    return {service.name: service for service in status(live.journal, time.time()).services}


def states(live: Live) -> dict[str, list[str]]:
    """Return the states of the instances of services that are declared."""
    return {name: [one.state for one in service.instances] for name, service in services(live).items() if service.declared}


def test_status_follows_services_their_file_and_the_loss_of_their_node(real_component: None, tmp_path: Path) -> None:
    file = tmp_path / "services.toml"
    file.write_text(table("judge", 600) + table("other"))
    plan = StackPlan(nodes=0, api_nodes=0, cells=1, cell_memory_mb=1000, services_file=file, variables=FAST_BEATS)
    with running(tmp_path / "state", plan) as live, live.client() as client:
        assert states(live) == {"judge": [], "other": []}
        # A service that nobody declares cannot be restored, and that is said
        order = {"service": "nobody", "cell_ids": [0], "evict": []}
        make_app(live.settings).send_task("tangram.restore", kwargs=order, queue=node_queue("gpu-0"))
        live.until(lambda: "no service 'nobody' here" in services(live)["nobody"].instances[0].reason if "nobody" in services(live) else "")
        # Given two services that take turns on one cell
        first = client.score("judge", ITEM)
        client.score("other", ITEM)
        live.until(lambda: states(live) == {"judge": ["host"], "other": ["resident"]})
        assert client.score("judge", ITEM) == first
        # When the first is back, then status has its counts
        live.until(lambda: states(live) == {"judge": ["resident"], "other": ["host"]})
        (found,) = services(live)["judge"].instances
        assert (found.node, found.cells, found.memory_mb) == ("gpu-0", (0,), 600.0)
        assert (found.starts, found.restores, found.evictions) == (1, 1, 1)
        # When the file changes: one service changes, one goes and one comes, which takes more calls than a worker has of anything else
        file.write_text(table("judge", 650) + table("newcomer", at_once=100))
        live.until(lambda: states(live) == {"judge": ["absent"], "newcomer": []})
        # Then the changed one is started anew when it is asked for, and the other one is gone
        client.score("judge", ITEM)
        live.until(lambda: [found.memory_mb for found in services(live)["judge"].instances] == [650.0])
        with pytest.raises(ActionError, match="service 'other' is not declared"):
            client.score("other", ITEM)
        # And so many calls at once are granted, and none waits in the worker for another to end: each can be cancelled
        action = calls.score("default", "newcomer", ITEM, {})
        handles = [client.submit(replace(action, arguments={**action.arguments, "work_s": 300.0})) for _ in range(100)]
        live.until(lambda: [found.running for found in services(live)["newcomer"].instances] == [100])
        client.cancel(job="default")
        for handle in handles:
            with pytest.raises(ActionError):
                handle.result(30)
        # And a wrong file changes nothing, not even when the worker is told to read it
        refused = "the services file is refused"
        file.write_text("[services.judge")
        live.until(lambda: live.log("gpu-0").count(refused) == 1)
        live.process("gpu-0").send_signal(signal.SIGHUP)
        live.until(lambda: live.log("gpu-0").count(refused) == 2)
        assert len(client.score("newcomer", ITEM)) == 1
        # When the worker is killed, then its rows say so
        live.end("gpu-0")
        live.until(lambda: {one.state for service in services(live).values() for one in service.instances} <= {"lost", "absent"})
