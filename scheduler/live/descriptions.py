"""Turns workers' descriptions (`tangram.wire.WireNode`) into the core's own values.

Whatever a worker says is bounded here, by what the core can keep and the journal can store. All functions raise `ValueError`,
`LookupError` or `TypeError` for an invalid description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from scheduler.model import UNLIMITED, NodeSpec, ServiceSpec, events
from tangram.action import is_name
from tangram.elasticity import LARGEST_AMOUNT

MOST_UNITS: Final = 65_536
"""Most cores, or GPU cells, of one node. The core keeps every one of them."""


def name_of(value: object) -> str:
    """Return a name, as `tangram.action.is_name` has it."""
    if not is_name(value):
        raise ValueError(f"no name of 1 to 256 printable characters: {ascii(value)[:80]}")
    return value


def count_of(value: Any, most: int = LARGEST_AMOUNT) -> int:
    """Return a whole number from 0 to `most`."""
    if not 0 <= value <= most:
        raise ValueError(f"not from 0 to {most}: {value!r:.80}")
    return int(value)


def amount_of(value: Any) -> float:
    """Return an amount of 0 or more."""
    if not 0 <= value < math.inf:
        raise ValueError(f"no amount of 0 or more: {value!r:.80}")
    return float(value)


def node_spec(description: Mapping[str, Any]) -> NodeSpec:
    """Return the node that a worker describes (`tangram.wire.WireNode`)."""
    domains = _domains_of(description)
    return NodeSpec(
        name=name_of(description["name"]),
        pools=tuple(map(name_of, description["kinds"])),
        cores=sum(map(len, domains)) if domains else count_of(description["cores"], MOST_UNITS),
        memory_mb=count_of(description["memory_mb"]) or UNLIMITED,
        cells=count_of(description["cells"], MOST_UNITS),
        cell_memory_mb=count_of(description["cell_memory_mb"]) or UNLIMITED,
        labels=frozenset(map(name_of, description["labels"])),
        domains=domains,
        services=frozenset(map(name_of, description["services"])) if "services" in description else None,
        grants_memory=description.get("grants_memory") is True,
        environments_max=count_of(description.get("environments_max") or UNLIMITED, UNLIMITED),
    )


def _domains_of(description: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the worker's cores by domain. Each core appears once, even if a worker repeats it, so that it is granted once."""
    seen = set[int]()
    domains = list[tuple[int, ...]]()
    for named in description.get("domains", ()):
        domain = tuple(core for core in dict.fromkeys(map(count_of, named)) if core not in seen)
        seen.update(domain)
        domains.append(domain)
    return tuple(domain for domain in domains if domain)


def services_of(description: Mapping[str, Any]) -> list[ServiceSpec]:
    """Return the services that a worker offers."""
    return [service_spec(name, declared) for name, declared in description.get("services", {}).items()]


def awaited_services(name: str, description: Mapping[str, Any]) -> Iterator[events.Event]:
    """Yield the events by which the core knows what the node `name` declared before it was away."""
    for service in services_of(description):
        yield events.ServiceDescribed(service=service)
    yield events.ServicesDeclared(node=name, services=frozenset(description.get("services", ())))


def service_spec(name: str, declared: Mapping[str, Any]) -> ServiceSpec:
    """Return the service that a table of the services file declares."""
    cells = tuple(count_of(number, MOST_UNITS) for number in declared.get("cells", [1]))
    return ServiceSpec(
        name=name_of(name),
        cells=cells,
        memory_mb=count_of(declared.get("memory_mb", 0)),
        restore_s=amount_of(declared.get("restore_s", 0.0)),
        max_concurrency=count_of(declared.get("max_concurrency", 1)),
        instances_per_node=None if declared.get("instances") is None else count_of(declared["instances"]),
        sizes=cells,
        pinned=bool(declared.get("pinned", False)),
        warm=bool(declared.get("warm", False)),
    )
