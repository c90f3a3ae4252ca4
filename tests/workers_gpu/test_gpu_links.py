"""The order of GPUs by their links, and what is read of NVML, with hand-made machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tangram.settings import Settings
from workers.gpu import devices as devices_here
from workers.gpu import nvml
from workers.gpu.devices import Device, discover, free_mb, visible
from workers.gpu.errors import DeviceError
from workers.gpu.links import HOST_BRIDGE, NUMA, NVLINK, SWITCH, SYSTEM, best_order

MIB = 1 << 20


def machine(count: int, *levels: tuple[int, Sequence[Sequence[int]]]) -> list[list[int]]:
    """Return a matrix in which the members of each group are as close as its level says; later levels are closer."""
    links = [[SYSTEM] * count for _ in range(count)]
    for closeness, groups in levels:
        for group in groups:
            for one in group:
                for other in group:
                    links[one][other] = closeness
    return links


def test_eight_gpus_on_a_switch_stay_in_their_order() -> None:
    assert best_order(machine(8, (NVLINK + 18, [range(8)]))) == list(range(8))


def test_linked_pairs_on_two_numa_nodes_are_neighbours_and_so_are_the_nodes() -> None:
    links = machine(8, (NUMA, [(0, 2, 4, 6), (1, 3, 5, 7)]), (NVLINK + 4, [(0, 4), (2, 6), (1, 5), (3, 7)]))

    assert best_order(links) == [0, 4, 2, 6, 1, 5, 3, 7]


def test_two_pairs_on_pci_switches_are_neighbours() -> None:
    assert best_order(machine(4, (HOST_BRIDGE, [range(4)]), (SWITCH, [(0, 2), (1, 3)]))) == [0, 2, 1, 3]


def test_a_pair_with_more_links_is_a_pair() -> None:
    assert best_order(machine(4, (NVLINK + 1, [range(4)]), (NVLINK + 2, [(0, 3), (1, 2)]))) == [0, 3, 1, 2]


def test_what_finds_no_partner_goes_last() -> None:
    assert best_order(machine(3, (SWITCH, [(1, 2)]))) == [1, 2, 0]
    assert best_order(machine(6, (NVLINK, [(0, 1)]), (NUMA, [(2, 3, 4, 5)]), (NVLINK, [(2, 4), (3, 5)]))) == [2, 4, 3, 5, 0, 1]
    assert (best_order([]), best_order([[0]])) == ([], [0])
    assert best_order(machine(17)) == list(range(17))


@given(st.permutations(range(8)))
def test_a_tree_is_found_however_its_leaves_are_numbered(numbers: list[int]) -> None:
    halves = [numbers[:4], numbers[4:]]
    pairs = [numbers[start : start + 2] for start in range(0, 8, 2)]
    order = best_order(machine(8, (NUMA, halves), (SWITCH, pairs)))

    assert sorted(order) == list(range(8))
    for size, groups in ((4, halves), (2, pairs)):
        assert {frozenset(order[start : start + size]) for start in range(0, 8, size)} == {frozenset(group) for group in groups}


class NoSuch(Exception):
    """NVML's own error."""


class FakeNvml(ModuleType):
    """A machine of two pairs of GPUs, 0 and 2, 1 and 3, linked by two NVLinks each, or by PCI alone."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE, NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE = 10, 20, 30, 40
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 2
    NVMLError = NoSuch

    def __init__(self, *, linked: bool = True, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.linked, self.driver, self.free = linked, driver, [1000 * MIB, 2000 * MIB, 3000 * MIB, 4000 * MIB]

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NoSuch("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.startswith("GPU-"):
            raise NoSuch("Not Found")
        return int(uuid[-1])

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abcd'[handle]}{handle}"

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80_000 * MIB, free=self.free[handle])

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 0 if self.linked and abs(one - other) == 2 else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 10 if abs(one - other) == 2 else 50

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"0000:{handle}".encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= 2:
            raise NoSuch("Invalid Argument")
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=f"0000:{(handle + 2) % 4}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Have a machine with a driver and NVML, and without torch."""
    module = FakeNvml()
    monkeypatch.setattr(devices_here, "DRIVER_FILES", (__file__,))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml.library.cache_clear()
    yield module
    nvml.library.cache_clear()


def numbers(devices: list[Device]) -> list[int]:
    return [int(device.uuid[-1]) for device in devices]


def test_gpus_are_cells_in_the_order_of_their_links(fake: FakeNvml) -> None:
    assert nvml.links(["GPU-a0", "GPU-b1", "GPU-c2"]) == [[0, SYSTEM, NVLINK + 2], [SYSTEM, 0, SYSTEM], [NVLINK + 2, SYSTEM, 0]]

    devices = discover()

    assert numbers(devices) == [0, 2, 1, 3]
    assert devices[1] == Device("cuda:2 (H100)", "cuda", 80_000, "cuda:2", "GPU-c2")
    assert numbers(discover(2)) == [0, 2]
    fake.linked = False
    assert numbers(discover()) == [0, 2, 1, 3]


def test_the_order_may_be_declared(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_GPU_ORDER", "3, 1,0")
    assert numbers(discover(order=Settings().gpus_in_order)) == [3, 1, 0]

    for order, problem in (([0, 0], "each device once"), ([4], "no CUDA device 4, this machine has 4"), ([], "each device once")):
        with pytest.raises(DeviceError, match=problem):
            discover(order=order)
    with pytest.raises(DeviceError, match="cells: 2 asked for, this machine has 1"):
        discover(2, order=[1])
    monkeypatch.setenv("TANGRAM_GPU_ORDER", "0,x")
    with pytest.raises(ValueError, match="'x' is no number of a device"):
        Settings()


def test_only_visible_gpus_count(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b,1")
    assert discover()[0].kind == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b,0")
    devices = discover()
    assert numbers(devices) == [3, 1, 0]
    assert [device.torch_device for device in devices] == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (None, ["GPU-a0", "GPU-a1", "MIG-b2"]),
        ("", []),
        ("-1", []),
        ("1", ["GPU-a1"]),
        ("2,0", ["MIG-b2", "GPU-a0"]),
        ("GPU-a1,MIG-b", ["GPU-a1", "MIG-b2"]),
        ("0,7,1", ["GPU-a0"]),
        ("GPU-a,1", []),
        ("0,0", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(said: str | None, left: list[str]) -> None:
    assert visible(["GPU-a0", "GPU-a1", "MIG-b2"], said) == left


def test_the_free_memory_of_a_gpu_is_measured_and_that_of_a_cpu_is_not(fake: FakeNvml) -> None:
    devices = discover()

    assert [free_mb(device) for device in devices] == [1000.0, 3000.0, 2000.0, 4000.0]
    assert free_mb(Device("gone", "cuda", 1, "cuda:9", "lost")) is None
    assert free_mb(Device("cpu:0", "cpu", 1, "cpu")) is None


def test_without_a_driver_there_are_no_gpus(fake: FakeNvml) -> None:
    fake.driver = False

    assert (nvml.gpus(), nvml.links(["GPU-a0"]), discover()[0].kind) == (None, None, "cpu")


def test_links_that_cannot_be_read_leave_the_order_as_it_is(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(one: int, other: int) -> int:
        raise NoSuch("Not Supported")

    fake.linked = False
    monkeypatch.setattr(fake, "nvmlDeviceGetTopologyCommonAncestor", refuse)

    assert numbers(discover()) == [0, 1, 2, 3]
