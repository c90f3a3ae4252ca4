"""MIG devices: one is a cell, several are refused, and so is a variable that does not say which."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from tests.workers_gpu.cards import FakeNvml
from workers.gpu.device_memory import NvmlMemory
from workers.gpu.devices import MIB, Device, discover
from workers.gpu.engines.vllm.command import visible
from workers.gpu.errors import DeviceError

WHOLE_MB, PART_MB = 80_000, 20_000


class FakeTorch(ModuleType):
    """torch as it sees one device: of a MIG device it says the memory, and the UUID of the whole GPU."""

    def __init__(self, name: str, uuid: str, memory_mb: int) -> None:
        super().__init__("torch")
        properties = SimpleNamespace(name=name, uuid=uuid, total_memory=memory_mb * MIB)
        self.cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: properties)


@pytest.fixture
def fake(with_nvml: Callable[[ModuleType], None]) -> FakeNvml:
    """Have a machine without torch: its first GPU is in two MIG devices, the second is without MIG, the third of a kind that has none."""
    module = FakeNvml("GPU-a1", "GPU-b2", "GPU-c3")
    module.parts, module.modes = {"GPU-a1": ["MIG-e1f", "MIG-e2f"]}, {"GPU-a1": [1, 1], "GPU-b2": [0, 1]}
    with_nvml(module)
    return module


def on_mig(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch see a MIG device."""
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("H100 MIG 2g.20gb", "a1", PART_MB))


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize("said", ["MIG-e1f", "MIG-e1", " MIG-e1f "])
def test_a_mig_device_that_is_named_is_the_cell_and_its_servers_are_given_its_whole_name(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, said: str, with_torch: bool
) -> None:
    if with_torch:
        on_mig(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    devices = discover()
    assert devices == [Device("cuda:0 (H100 MIG 2g.20gb)", "cuda", PART_MB, "cuda:0", "MIG-e1f")]
    assert visible({"CUDA_VISIBLE_DEVICES": said}, devices) == ["MIG-e1f"]
    assert NvmlMemory().used_mb(devices[0]) == NvmlMemory().total_mb(devices[0]) - 7.0


def test_without_nvml_the_name_of_a_mig_device_is_taken_as_it_is_given(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    on_mig(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-e1f")
    assert [device.uuid for device in discover()] == ["MIG-e1f"]
    # One that is not named is known by what torch calls it
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(DeviceError, match="H100 MIG 2g.20gb is a MIG device: set CUDA_VISIBLE_DEVICES to its UUID"):
        discover()


ONE_EACH = "a worker has one MIG device .*: start a worker for each"
TO_SET = r"and MIG is enabled on GPU-a1: set it to one MIG device \(MIG-e1f, MIG-e2f\) or to the UUIDs of GPUs without MIG"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        *[(said, f"={said}: {ONE_EACH}") for said in ("MIG-e1f,MIG-e2f", "MIG-e1f,MIG-e1f", "MIG-e1f,GPU-b2", "1,MIG-e1f")],
        *[(said, f"={said}: must name one of MIG-e1f, MIG-e2f") for said in ("MIG-e", "MIG-77")],
        (None, f" is not set, {TO_SET}"),
        *[(said, f"={said}, {TO_SET}") for said in ("0", "1", "GPU-b2,GPU-a")],
    ],
)
def test_what_may_show_several_devices_none_or_a_gpu_with_mig_is_refused_with_what_to_set(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, said: str | None, words: str
) -> None:
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    with pytest.raises(DeviceError, match=f"^CUDA_VISIBLE_DEVICES{words}$"):
        discover()


def test_a_gpu_with_mig_on_which_no_mig_device_was_made_yet_is_refused(fake: FakeNvml) -> None:
    fake.parts["GPU-a1"] = []
    with pytest.raises(DeviceError, match="there is none yet"):
        discover()


def test_gpus_without_mig_beside_one_with_it_are_cells_once_their_uuids_are_given(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,GPU-b2")
    assert [(device.uuid, device.memory_mb) for device in discover()] == [("GPU-c3", WHOLE_MB), ("GPU-b2", WHOLE_MB)]
    # And a machine on which MIG is only about to be enabled is as any other
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    fake.modes["GPU-a1"] = [0, 1]
    assert [device.uuid for device in discover()] == ["GPU-a1", "GPU-b2", "GPU-c3"]


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0", "NoDevFiles"])
def test_hidden_devices_are_not_asked_about_mig(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert discover()[0].kind == "cpu"


@pytest.mark.parametrize("said", ["3", "0,0", "GPU-x"])
def test_devices_that_torch_does_not_find_are_named_not_replaced_by_the_cpu(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    fake.modes = {}
    torch = FakeTorch("none", "", 0)
    torch.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES={said} leaves no device: .*torch must be built with CUDA"):
        discover()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert discover()[0].kind == "cpu"


def test_cells_carry_the_uuids_that_torch_gives_whatever_the_order(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.modes = {}
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("H100", "c3", WHOLE_MB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [device.uuid for device in discover()] == ["GPU-c3"]
