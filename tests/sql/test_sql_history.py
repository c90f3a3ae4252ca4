"""What reports and exports read of a journal, from both databases."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from app.journal.database import snapshot
from app.journal.figures import Selection
from app.journal.history import NodeSize, PastPod, declarations, history


def test_the_past_of_a_job_is_its_actions_its_grants_its_pods_and_the_nodes_that_they_name(engine: Engine, make: Any, write: Any) -> None:
    # Given an environment with two cores for itself, an action that lost its node and was granted again, one that waits, and another job
    write(make.node("up", 1.0), make.node("up", 1.0, name="n2", cores=4, cells=2), make.node("up", 1.0, name="idle"))
    opening = [make.received("o", 90.0, kind="cpu.open"), make.granted("o", 91.0), make.environment("open", 92.0, pod_cores=2)]
    write(*opening, make.ended("o", 92.0))
    write(make.received("b", 100.0), make.granted("b", 101.0), make.requeued("b", 102.0))
    again = make.granted("b", 103.0, attempt=2, node="n2", core_ids=(0,), units=1)
    write(again, make.resized("b", 104.0, attempt=2, core_ids=(0, 1)), make.ended("b", 106.0, unit_s=5.0))
    write(make.received("a", 99.0), make.received("x", 98.0, job="other"), make.granted("x", 99.0))
    write(make.environment("closed", 110.0, pod_cores=2))

    with snapshot(engine) as connection:
        found = history(connection, Selection(jobs=("coding",)))
        of_time = history(connection, Selection(since=99.0, until=100.0))

    assert [(one.id, one.status, one.attempts, one.ended_at) for one in found.actions] == [
        ("o", "succeeded", 1, 92.0),
        ("a", "waiting", 0, None),
        ("b", "succeeded", 2, 106.0),
    ]
    held = [(one.action, one.attempt, one.node, one.core_ids, one.granted_at, one.resized_at, one.released_at) for one in found.grants]
    assert held == [
        ("o", 1, "n1", [4, 5], 91.0, None, 92.0),
        ("b", 1, "n1", [4, 5], 101.0, None, 102.0),
        ("b", 2, "n2", [0, 1], 103.0, 104.0, 106.0),
    ]
    assert found.pods == [PastPod(node="n1", core_ids=[4, 5], opened_at=92.0, ended_at=110.0)]
    assert found.nodes == {"n1": NodeSize(8, 0), "n2": NodeSize(4, 2)}
    assert {one.id for one in of_time.actions} == {"b"}


def test_declarations_have_the_headers_and_the_services_that_they_name(engine: Engine, make: Any, write: Any) -> None:
    services = {"judge": {"cells": [1]}, "unused": {"cells": [1]}}
    write(make.node("up", 1.0, cells=2, services=services))
    write(make.received("g", kind="gpu.score", service="judge", environment=None, cost={"cells": [1]}), make.ended("g"))
    write(make.received("c", 101.0, cost={"cores": [1, 4]}), make.received("x", job="other"))
    found = declarations(engine, Selection(jobs=("coding",)))
    assert [(one.past.id, one.header["cost"]) for one in found.actions] == [("g", {"cells": [1]}), ("c", {"cores": [1, 4]})]
    assert list(found.services) == ["judge"] and found.services["judge"]["cells"] == [1]
