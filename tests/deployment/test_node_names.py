"""How a node is called that nobody has named."""

from __future__ import annotations

import socket

import pytest

from app.own_container import COMPOSE, node_name, service_name
from tangram.settings import Settings

WORKER = {f"{COMPOSE}{name}": value for name, value in (("project", "p"), ("service", "cpu-worker"), ("container-number", "2"))}


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (WORKER, "machine-p-cpu-worker-2"),
        ({**WORKER, f"{COMPOSE}oneoff": "False", "tangram.node": "x"}, "machine-p-cpu-worker-2"),
        ({**WORKER, f"{COMPOSE}oneoff": "True"}, ""),
        ({f"{COMPOSE}project": "p", f"{COMPOSE}service": "cpu-worker"}, ""),  # those of an image that compose has built
        ({}, ""),
    ],
)
def test_a_container_of_composes_is_named_after_what_stays_when_it_is_replaced(labels: dict[str, str], name: str) -> None:
    assert service_name(labels, "machine") == name


@pytest.mark.parametrize("sandbox", ["process", "docker"])
def test_a_worker_in_no_container_of_the_engine_here_is_named_after_its_host(sandbox: str) -> None:
    settings = Settings(sandbox=sandbox, node_name=None)
    assert node_name("cpu", settings) == f"{socket.gethostname()}-cpu"
    assert node_name("cpu", settings.model_copy(update={"node_name": "mine"})) == "mine"
