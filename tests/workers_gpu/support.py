"""Hosts of stub services, and stubs that hold on to memory, keep copies or die."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.services_file import ServiceConfig
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName, InstanceStatus

NOWHERE = Path("nowhere")
ITEM = {"prompt": "p", "response": "r"}

Factory = Callable[..., Engine]


def service(memory_mb: float = 600, **more: object) -> ServiceConfig:
    """Declare a stub that may be on one cell or on two."""
    return ServiceConfig.model_validate({"engine": "stub", "task": "score", "memory_mb": memory_mb, "cells": [1, 2], **more})


def at(service: str, *cells: int) -> InstanceName:
    """Name an instance."""
    return InstanceName(service, cells)


def hosting(
    cells: Sequence[Device],
    services: Mapping[str, ServiceConfig | float] | str,
    engines: Mapping[str, Engine] | Factory | None = None,
    **more: object,
) -> ServiceHost:
    """Host services, each by its declaration, its MiB, or its letter alone; `engines` are those of some services, or make all."""
    named = {name: services[name] if isinstance(services, Mapping) else 600.0 for name in services}
    declared = {name: service(said) if isinstance(said, int | float) else said for name, said in named.items()}
    factory = engines if callable(engines) else lambda name, config, *_: (engines or {}).get(name) or stub(name, config)
    return ServiceHost(cells, declared, NOWHERE, factory=factory, **more)  # type: ignore[arg-type]


def of(host: ServiceHost, service: str, *cells: int) -> InstanceStatus:
    """Return how an instance stands; without cells the only one of its service."""
    (found,) = (one for one in host.status() if one.name.service == service and cells in ((), one.name.cells))
    return found


def states(host: ServiceHost) -> dict[str, str]:
    """Return the state of each instance."""
    return {str(found.name): found.state for found in host.status()}


def stub(name: str, config: ServiceConfig, *_: object, kind: type[StubEngine] = StubEngine) -> StubEngine:
    """Make an engine as it is declared."""
    return kind(name, config.task, config.memory_mb, config.max_concurrency)


class Mortal(StubEngine):
    """Dies when a test asks, and holds nothing then."""

    def die(self) -> None:
        self._free()
        assert self._life.broke("its server ended by itself with signal 9")


class Copying(StubEngine):
    """Has a copy in host memory, as large as what it holds on one device, while it is off its devices."""

    def host_mb(self) -> float:
        return self._declared_mb if self.state == "host" else 0.0


def copying(name: str, config: ServiceConfig, *_: object) -> Copying:
    """Make an engine that keeps a copy."""
    made = stub(name, config, kind=Copying)
    assert isinstance(made, Copying)
    return made
