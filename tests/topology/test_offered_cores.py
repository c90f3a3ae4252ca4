"""What a CPU worker offers: real cores by domain, less the reserved ones; made-up ones where there are not as many."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import signals
from hypothesis import given, settings
from hypothesis import strategies as st

from app.own_groups import usable_cores
from app.services_file import ConfigError
from scheduler.live.descriptions import node_spec
from scheduler.model import UNLIMITED
from tangram.settings import Settings
from tests.workers_cpu.conftest import none_works
from workers.cpu.cores import CoreMap
from workers.cpu.topology import Domain, Topology, read_topology
from workers.start import _offered_cores, _process_sandbox, describe


def offered(machine: Topology, **given: int) -> list[list[int]]:
    return _offered_cores(Settings(**given), machine, lambda most: most)  # type: ignore[arg-type]


def test_fewer_cores_are_the_first_ones(two_sockets: Path) -> None:
    assert offered(read_topology(range(16), two_sockets), cores=9) == [[0, 8, 1, 9, 2, 10, 3, 11], [4]]


def test_reserved_cores_are_not_offered(two_sockets: Path) -> None:
    # Given cores for the system; when all others are wanted, or more of them than are left; then what is left is offered
    machine = read_topology(range(16), two_sockets)
    left = [[1, 9, 2, 10, 3, 11], [4, 12, 5, 13, 6, 14, 7, 15]]
    assert offered(machine, reserved_cores=2) == offered(machine, reserved_cores=2, cores=16) == left


def test_more_cores_than_there_are_are_virtual_ones() -> None:
    assert offered(Topology((Domain(((3,),)), Domain(((7,),)))), cores=4) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("kind", "files", "usable"),
    [
        ("cgroup2", {"pod/cpu.max": "250000 100000", "pod/box/cpu.max": "max 100000"}, 2),
        ("cgroup2", {"pod/box/cpu.max": "50000 100000"}, 1),
        ("cgroup2", {"pod/box/cpu.max": "900000 100000"}, 4),
        ("cgroup", {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 4),
        ("cgroup", {"pod/box/cpu.cfs_quota_us": "150000", "pod/box/cpu.cfs_period_us": "50000"}, 3),
    ],
)
def test_a_quota_leaves_whole_cores(tmp_path: Path, kind: str, files: dict[str, str], usable: int) -> None:
    # Given the kernel's word on a process in the group /pod/box, and what limits it there and above
    (tmp_path / "cgroup").write_text("0::/pod/box\n" if kind == "cgroup2" else "4:cpu,cpuacct:/pod/box\n3:memory:/\n")
    (tmp_path / "mountinfo").write_text(f"30 23 0:26 / {tmp_path}/groups rw - {kind} cgroup rw,cpu,cpuacct\n")
    for name, words in files.items():
        (file := tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{words}\n")
    assert usable_cores(4, tmp_path) == usable
    # And commands in containers, which are in no group of the worker's, are not held by it
    machine = Topology((Domain(((0, 1), (2, 3))),))
    own, beside = (_offered_cores(Settings(sandbox=of), machine, lambda most: usable_cores(most, tmp_path)) for of in ("process", "docker"))
    assert (len(own[0]), len(beside[0])) == (usable, 4)


@pytest.mark.parametrize("reserved", [2, 3])
def test_nothing_left_is_refused_in_one_line(reserved: int) -> None:
    with pytest.raises(ConfigError, match=f"^TANGRAM_RESERVED_CORES={reserved} leaves nothing of the 2 cores here$"):
        offered(Topology((Domain(((0, 1),)),)), reserved_cores=reserved)


def test_a_worker_whose_commands_see_the_host_warns_of_it_and_so_does_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a host on which nothing sets commands apart
    none_works(monkeypatch)
    monkeypatch.setattr(signals.worker_ready, "receivers", [])
    # When a worker of its own accord does without
    sandbox, isolation = _process_sandbox(tmp_path / "base", CoreMap((0,)), Settings(), "fixed")
    sandbox.close()
    # Then it says so, once it is ready
    assert isolation == "none"
    signals.worker_ready.send(sender=None)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("commands are set apart by: none; all environments share /tmp (bubblewrap does not work")


def test_the_scheduler_learns_the_domains() -> None:
    description = describe("cpu", Settings(node_name="n0"), cores=3, domains=[[4, 6], [5]])
    assert (node_spec(description).cores, node_spec(description).domains) == (3, ((4, 6), (5,)))


affinities = st.sets(st.integers(0, 40), min_size=1, max_size=12)


@given(available=affinities, count=st.integers(1, 100))
def test_numbered_cores_are_spread_evenly_over_the_machine(available: set[int], count: int) -> None:
    core_map = CoreMap(tuple(sorted(available)))
    on = [next(iter(core_map.real((core,)))) for core in range(count)]
    # Then no core bears two more than another: none bears two where there are as many
    borne = [on.count(core) for core in available]
    assert max(borne) - min(borne) <= 1


@settings(max_examples=10)
@given(available=affinities)
def test_offered_ids_of_real_cores_are_these_cores(available: set[int]) -> None:
    cores = [core for domain in offered(read_topology(available, Path("/nowhere"))) for core in domain]
    core_map = CoreMap(tuple(sorted(available)))
    assert all(core_map.real((core,)) == {core} for core in cores)
    assert set(cores) == available


@pytest.mark.parametrize(("declared", "most"), [(None, UNLIMITED), (7, 7)])
def test_a_node_is_described_with_the_most_environments_that_it_holds(declared: int | None, most: int) -> None:
    assert node_spec(describe("cpu", Settings(node_name="n0", environments_max=declared), cores=3)).environments_max == most
