"""Services on a live stack: a services file that changes, and what status says of it."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from app.celery import make_app
from app.journal.status import ServiceStatus, status
from tangram import calls
from tangram.errors import ActionError
from tangram.wire import node_queue
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("gpu_node")]

ITEM = [{"prompt": "p", "response": "r"}]
NEWCOMER = '\n[services.newcomer]\nengine = "stub"\ntask = "score"\nmemory_mb = {}\nmax_concurrency = 100\n'


def services(live: Live) -> dict[str, ServiceStatus]:
    return {service.name: service for service in status(live.journal, time.time()).services}


def test_status_follows_services_and_their_file(live: Live) -> None:
    file = live.plan.services_file
    assert file is not None
    before = file.read_text()

    def write(text: str) -> None:
        file.write_text(text)
        live.process("gpu-0").send_signal(signal.SIGHUP)

    def held() -> list[tuple[str, float, int]]:
        """Return the state, the memory and the calls of each instance of the service that comes and goes."""
        return [(one.state, one.memory_mb, one.running) for one in services(live)["newcomer"].instances]

    with live.client("services") as client:
        # A service that nobody declares cannot be restored, and that is said
        order = {"service": "nobody", "cell_ids": [0], "evict": []}
        make_app(live.settings).send_task("tangram.restore", kwargs=order, queue=node_queue("gpu-0"))
        live.until(lambda: "nobody" in services(live))
        assert "no service 'nobody' here" in services(live)["nobody"].instances[0].reason
        # When a service comes that takes more calls than a worker has of anything else
        write(before + NEWCOMER.format(600))
        live.until(lambda: "newcomer" in services(live))
        # Then so many calls at once are granted, and none waits in the worker for another to end: each can be cancelled
        action = calls.score("services", "newcomer", ITEM, {})
        handles = [client.submit(replace(action, arguments={**action.arguments, "work_s": 300.0})) for _ in range(100)]
        live.until(lambda: held() == [("resident", 600.0, 100)])
        client.cancel(job="services")
        for handle in handles:
            with pytest.raises(ActionError):
                handle.result(30)
        # When it changes, then it is started anew when it is asked for
        write(before + NEWCOMER.format(650))
        live.until(lambda: [state for state, *_ in held()] == ["absent"])
        client.score("newcomer", ITEM)
        live.until(lambda: held() == [("resident", 650.0, 0)])
        # And a wrong file changes nothing
        write("[services.judge")
        live.until(lambda: "the services file is refused" in live.log("gpu-0"))
        assert len(client.score("newcomer", ITEM)) == 1
        # When it goes, then it is gone
        write(before)
        live.until(lambda: not services(live)["newcomer"].declared)
        with pytest.raises(ActionError, match="service 'newcomer' is not declared"):
            client.score("newcomer", ITEM)
