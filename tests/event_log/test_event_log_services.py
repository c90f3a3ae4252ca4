"""What is decided about services follows from the log alone: who shares cells, who is restored, what workers say of instances."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.event_log import EventLogFile, main
from scheduler.live.event_log import Setup
from scheduler.model import NodeSpec, ServiceSpec, commands, events
from tangram.action import Action, Cost

SERVICES = (
    ServiceSpec(name="warm", memory_mb=40, restore_s=0.5, max_concurrency=2, warm=True),
    ServiceSpec(name="beside", memory_mb=50, restore_s=0.5),
    ServiceSpec(name="whole", cells=(2,), memory_mb=100, restore_s=0.5, instances_per_node=1),
    ServiceSpec(name="sized", cells=(1, 2), sizes=(2,), pinned=True, restore_s=0.5),
)
NODE = NodeSpec(name="gpu", pools=("gpu",), cells=2, cell_memory_mb=100)


def score(id: str, service: str) -> events.Submitted:
    return events.Submitted(id=id, action=Action(kind="gpu.score", cost=Cost({}), service=service, job="a"), submitted_at=0.0)


@pytest.mark.parametrize("policy", ["elastic", "paper", "static:1"])
def test_a_log_with_services_replays_to_the_same_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str) -> None:
    # Given a log in which instances are restored, shared, reported, evicted and lost, and a service is declared anew
    setup = Setup(policy=policy, services=SERVICES)
    core, path = setup.core(), tmp_path / "events.jsonl"
    log = EventLogFile(path, 1, setup)
    now, decided = 0.0, 0

    def take(event: events.Event) -> list[commands.Command]:
        nonlocal now, decided
        now, decided = now + 1.0, decided + 1
        out = core.handle(event, now)
        log.handled(event, now, out)
        return out

    def finish(started: list[commands.Command]) -> None:
        for one in started:
            if isinstance(one, commands.Start):
                finish(take(events.Finished(id=one.id, attempt=one.grant.attempt, status="succeeded", execution_s=0.5)))

    take(events.NodeJoined(node=NODE))
    out = take(events.Tick())
    for restore in (one for one in out if isinstance(one, commands.Restore)):
        take(events.ServiceChanged(node="gpu", service=restore.service, cell_ids=restore.cell_ids, state="resident"))
    for number, service in enumerate(("warm", "beside", "whole", "warm", "beside", "whole")):
        finish(take(score(f"{service}-{number}", service)))
        for _ in range(3):
            finish(take(events.Tick()))
    take(events.ServiceChanged(node="gpu", service="whole", cell_ids=(0, 1), state="failed", reason="it died"))
    changed = replace(SERVICES[1], memory_mb=100)
    take(events.ServiceDescribed(service=changed))
    finish(take(score("again", "beside")))
    finish(take(score("sized", "sized")))
    take(events.NodeLost(name="gpu", reason="3 beats missed"))
    log.close()
    written = path.read_text()
    grants = [command["grant"] for line in written.splitlines() for command in json.loads(line).get("commands", ()) if "grant" in command]
    if policy == "elastic":
        assert '"type":"Restore"' in written
        assert any(grant.get("evict") for grant in grants)
        assert {tuple(grant.get("cell_ids", ())) for grant in grants} >= {(0, 1)}

    # When it is replayed; then all is equal
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"{decided} decisions, all equal\n"
