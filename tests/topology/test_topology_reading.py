"""What is read of a machine: domains in order, caches and siblings as neighbours, and nothing that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.cpu.topology import Domain, Topology, read_topology

from .conftest import Files, core_files

System = Callable[[Files], Path]


def domains(topology: Topology) -> list[tuple[int, ...]]:
    return [domain.cores for domain in topology.domains]


def test_sockets_are_domains_and_siblings_are_neighbours(two_sockets: Path) -> None:
    topology = read_topology(range(16), two_sockets)
    assert domains(topology) == [(0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)]
    assert topology.domains[1].physical == ((4, 12), (5, 13), (6, 14), (7, 15))


def test_only_the_cores_of_the_affinity_mask_count(two_sockets: Path) -> None:
    assert read_topology({1, 5, 9, 13, 14}, two_sockets).domains == (Domain(((1, 9),)), Domain(((5, 13), (14,))))
    # And a socket without any is no domain
    assert domains(read_topology({12, 4}, two_sockets)) == [(4, 12)]


def test_cores_that_are_offline_are_left_out(system: System) -> None:
    # Given a machine whose third core is offline, so that it has a folder and nothing in it
    files: Files = {"cpu/online": "0-1,3", "cpu/cpu2/online": "0", "node/node0/cpulist": "0-1,3"}
    for core in (0, 1, 3):
        files |= core_files(core)
    assert domains(read_topology(range(4), system(files))) == [(0, 1, 3)]


def test_nodes_within_a_socket_are_domains_of_their_own(system: System) -> None:
    # Given one socket that is divided into two nodes, and a node of memory alone
    files: Files = {"node/node0/cpulist": "0-1", "node/node1/cpulist": "2-3", "node/node2/cpulist": ""}
    for core in range(4):
        files |= core_files(core)
    assert domains(read_topology(range(4), system(files))) == [(0, 1), (2, 3)]


def test_cores_of_a_cache_are_neighbours_within_their_node(system: System) -> None:
    # Given a node in which every other core shares a cache, with siblings in each
    files: Files = {"node/node0/cpulist": "0-7"}
    for core in range(8):
        odd = core % 2
        files |= core_files(core, siblings=f"{core % 4},{core % 4 + 4}", cache="1,3,5,7" if odd else "0,2,4,6")
    assert read_topology(range(8), system(files)).domains == (Domain(((0, 4), (2, 6), (1, 5), (3, 7))),)


def test_older_kernels_name_siblings_otherwise(system: System) -> None:
    files = {f"cpu/cpu{core}/topology/thread_siblings_list": f"{core % 2},{core % 2 + 2}" for core in range(4)}
    assert read_topology(range(4), system(files)).domains == (Domain(((0, 2), (1, 3))),)


@pytest.mark.parametrize("text", ["", "none", "0-", "x-3", "1,,y"])
def test_a_machine_that_says_nothing_is_one_domain(system: System, text: str) -> None:
    # Given files that make no sense, or none at all
    names = ("cpu/online", "node/node0/cpulist", "cpu/cpu0/topology/core_cpus_list", "cpu/cpu0/cache/index3/shared_cpu_list")
    folder = system(dict.fromkeys(names, text))
    for place in (folder, folder / "nowhere"):
        assert read_topology((5, 0, 3), place).domains == (Domain(((0,), (3,), (5,))),)


def test_this_machine_has_the_cores_of_this_process() -> None:
    assert sorted(Topology.of_this_process().cores) == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("count", "left"),
    [
        (4, [(2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)]),
        (3, [(9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)]),  # an odd number parts one physical core
        (10, [(5, 13, 6, 14, 7, 15)]),  # more than a domain goes on in the next
    ],
)
def test_reserved_cores_are_whole_physical_ones_of_the_first_domains(two_sockets: Path, count: int, left: list[tuple[int, ...]]) -> None:
    assert domains(read_topology(range(16), two_sockets).without(count)) == left


physical_cores = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=3)


@given(sizes=physical_cores, count=st.integers(0, 70))
def test_exactly_as_many_as_asked_for_are_reserved_and_the_first_of_a_kind_at_most_parted(sizes: list[list[int]], count: int) -> None:
    ids = iter(range(1000))
    machine = Topology(tuple(Domain(tuple(tuple(next(ids) for _ in range(size)) for size in domain)) for domain in sizes))
    left = machine.without(count)
    # Then so many are, the domains before the last of them entirely, and at most one physical core is parted
    assert len(left.cores) == max(0, len(machine.cores) - count)
    gone = set(machine.cores) - set(left.cores)
    touched = [set(domain.cores) & gone for domain in machine.domains]
    full = [set(domain.cores) <= gone for domain in machine.domains]
    assert all(full[number] for number in range(len(full) - 1) if touched[number + 1])
    physical = [set(siblings) for domain in machine.domains for siblings in domain.physical]
    assert sum(0 < len(siblings & gone) < len(siblings) for siblings in physical) <= 1
    assert machine.first(len(machine.cores)) == machine
