"""Turns workers' descriptions (`tangram.wire.WireNode`) into the core's own values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.model import UNLIMITED, NodeSpec, ServiceSpec


def node_spec(description: Mapping[str, Any]) -> NodeSpec:
    """Return the node that a worker describes (`tangram.wire.WireNode`)."""
    domains = _domains_of(description)
    return NodeSpec(
        name=str(description["name"]),
        pools=tuple(str(kind) for kind in description["kinds"]),
        cores=sum(map(len, domains)) if domains else int(description["cores"]),
        memory_mb=int(description["memory_mb"]) or UNLIMITED,
        cells=int(description["cells"]),
        cell_memory_mb=int(description["cell_memory_mb"]) or UNLIMITED,
        labels=frozenset(str(label) for label in description["labels"]),
        domains=domains,
        services=frozenset(map(str, description["services"])) if "services" in description else None,
    )


def _domains_of(description: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the worker's cores by domain. Each core appears once, even if a worker repeats it, so that it is granted once."""
    seen = set[int]()
    domains = list[tuple[int, ...]]()
    for named in description.get("domains", ()):
        domain = tuple(core for core in dict.fromkeys(map(int, named)) if core not in seen)
        seen.update(domain)
        domains.append(domain)
    return tuple(domain for domain in domains if domain)


def services_of(description: Mapping[str, Any]) -> list[ServiceSpec]:
    """Return the services that a worker offers."""
    return [service_spec(name, declared) for name, declared in description.get("services", {}).items()]


def service_spec(name: str, declared: Mapping[str, Any]) -> ServiceSpec:
    """Return the service that a table of the services file declares."""
    return ServiceSpec(
        name=name,
        cells=tuple(declared.get("cells", [1])),
        memory_mb=int(declared.get("memory_mb", 0)),
        restore_s=float(declared.get("restore_s", 0.0)),
        max_concurrency=int(declared.get("max_concurrency", 1)),
        instances_per_node=None if declared.get("instances") is None else int(declared["instances"]),
        sizes=tuple(declared.get("cells", [1])),
        pinned=bool(declared.get("pinned", False)),
        warm=bool(declared.get("warm", False)),
    )
