"""Where the cores of this machine lie: which share a physical core, a cache, memory.

Read from the kernel's own description below `/sys/devices/system`, restricted to the cores that this process may use. What
cannot be read there counts as shared by all cores, so that a machine that says nothing is one domain.

| word | cores that share | file |
|---|---|---|
| physical core | an execution unit (SMT siblings) | `cpu/cpu*/topology/core_cpus_list`, `thread_siblings_list` on older kernels |
| cache | the last level of cache | `cpu/cpu*/cache/index*/shared_cpu_list` |
| domain | memory and socket | `node/node*/cpulist`, `cpu/cpu*/topology/physical_package_id` |

A domain is the whole of a NUMA node and not one cache: an action may want more cores than share a cache. Within a domain
the cores of a cache are neighbours, and within these the siblings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SYSTEM = Path("/sys/devices/system")

PhysicalCore = tuple[int, ...]
"""The ids of the SMT siblings on one physical core, ascending."""

Shared = TypeVar("Shared")


@dataclass(frozen=True, slots=True)
class Domain:
    """Cores that share memory, as physical cores in an order in which neighbours have most in common."""

    physical: tuple[PhysicalCore, ...]

    @property
    def cores(self) -> tuple[int, ...]:
        """The ids of the cores, in order."""
        return tuple(core for siblings in self.physical for core in siblings)


@dataclass(frozen=True, slots=True)
class Topology:
    """The domains of a machine, in order; none of them is empty."""

    domains: tuple[Domain, ...]

    @classmethod
    def of_this_process(cls) -> Topology:
        """Return where the cores in the affinity mask of this process lie."""
        return read_topology(os.sched_getaffinity(0))

    @property
    def cores(self) -> tuple[int, ...]:
        """The ids of all cores, in order."""
        return tuple(core for domain in self.domains for core in domain.cores)

    def first(self, count: int) -> Topology:
        """Return this machine with its first `count` cores only."""
        return self._with(frozenset(self.cores[:count]))

    def without(self, count: int) -> Topology:
        """Return this machine less `count` cores of its first domains: whole physical cores as far as that can be.

        At most all of them: then no domain is left.
        """
        reserved = set[int]()
        for domain in self.domains:
            for siblings in domain.physical:
                if len(reserved) + len(siblings) <= count:
                    reserved.update(siblings)
            left = [core for core in domain.cores if core not in reserved]
            reserved.update(left[: count - len(reserved)])
        return self._with(frozenset(self.cores) - reserved)

    def _with(self, kept: Collection[int]) -> Topology:
        domains = (tuple(_only(siblings, kept) for siblings in domain.physical) for domain in self.domains)
        return Topology(tuple(Domain(tuple(filter(None, physical))) for physical in domains if any(physical)))


def read_topology(cores: Iterable[int], system: Path = SYSTEM) -> Topology:
    """Return where these cores lie, as the files below `system` say; cores that are offline are left out."""
    wanted = frozenset(cores)
    usable = sorted(wanted & (_cores_in(system / "cpu" / "online") or wanted)) or sorted(wanted)
    nodes = _nodes(system)
    locations = {core: (*_location(core, nodes, system), _siblings(core, usable, system)) for core in usable}
    domains = _grouped(usable, lambda core: locations[core][:2])
    return Topology(tuple(_domain(domain, {core: locations[core][2:] for core in domain}) for domain in domains))


def _domain(cores: list[int], locations: dict[int, tuple[tuple[int, ...], PhysicalCore]]) -> Domain:
    """Return a domain of these cores, each with the cores of its cache and those of its physical core."""
    caches = _grouped(cores, lambda core: locations[core][0])
    return Domain(tuple(tuple(one) for cache in caches for one in _grouped(cache, lambda core: locations[core][1])))


def _location(core: int, nodes: dict[int, int], system: Path) -> tuple[int, int, tuple[int, ...]]:
    """Return the NUMA node of a core, its socket, and the cores with which it shares the last level of cache."""
    folder = system / "cpu" / f"cpu{core}"
    levels = []
    for index in folder.glob("cache/index*"):
        sharing = _cores_in(index / "shared_cpu_list")
        if sharing:
            levels.append((_number_in(index / "level"), tuple(sorted(sharing))))
    return nodes.get(core, -1), _number_in(folder / "topology" / "physical_package_id"), max(levels, default=(-1, ()))[1]


def _siblings(core: int, usable: Collection[int], system: Path) -> PhysicalCore:
    topology = system / "cpu" / f"cpu{core}" / "topology"
    said = _cores_in(topology / "core_cpus_list") or _cores_in(topology / "thread_siblings_list")
    return _only(sorted(said | {core}), usable)


def _nodes(system: Path) -> dict[int, int]:
    """Return the NUMA node of each core. Nodes of memory alone have none."""
    folders = [folder for folder in system.glob("node/node*") if folder.name.removeprefix("node").isdigit()]
    return {core: int(folder.name.removeprefix("node")) for folder in folders for core in _cores_in(folder / "cpulist")}


def _grouped(cores: Iterable[int], key: Callable[[int], Shared]) -> list[list[int]]:
    """Group cores by what they share; the groups are in the order of their first cores."""
    groups: dict[Shared, list[int]] = {}
    for core in cores:
        groups.setdefault(key(core), []).append(core)
    return list(groups.values())


def _only(cores: Iterable[int], kept: Collection[int]) -> tuple[int, ...]:
    return tuple(core for core in cores if core in kept)


def _number_in(path: Path) -> int:
    """Return the number in a file; -1 where there is none."""
    try:
        return int(_text_of(path))
    except ValueError:
        return -1


def _cores_in(path: Path) -> frozenset[int]:
    """Return the cores that a file lists, like `0-3,8`; none where it cannot be read."""
    found = set[int]()
    try:
        for part in filter(None, _text_of(path).split(",")):
            first, dash, last = part.partition("-")
            found.update(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(found)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
