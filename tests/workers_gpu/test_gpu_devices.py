"""Devices of this machine: CPU devices, and GPUs and MIG devices that a driver lists, in the order in which they are cells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from app.services_file import ServiceConfig
from tangram.settings import Settings
from tests.lazily import needs
from tests.workers_gpu.cards import FakeNvml, gpu
from workers.gpu import nvml
from workers.gpu.device_memory import NvmlMemory
from workers.gpu.devices import MIB, Device, discover, visible
from workers.gpu.engines.factory import open_contexts
from workers.gpu.engines.vllm import command
from workers.gpu.errors import DeviceError
from workers.memory import usable_mb

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from pathlib import Path
from app.services_file import ConfigError, ServiceConfig
from tests.workers_gpu.cards import gpu
from tests.workers_gpu.support import hosting
from workers.gpu import devices
from workers.gpu.engines.factory import create_engine, open_contexts
devices.DRIVER_FILES = ("/nowhere",)
host = hosting(devices.discover(2, 1000), "s", create_engine)
open_contexts([gpu()], host.services)
host.ensure_resident("s", (1,))
print("torch" in sys.modules)
sys.modules["torch"] = sys.modules["transformers"] = None
torch = ServiceConfig(engine="torch", task="score", memory_mb=10, model=Path("m"))
for made in (lambda: hosting([], {"t": torch}, create_engine), lambda: open_contexts([gpu()], {**host.services, "t": torch})):
    try:
        made()
    except ConfigError as error:
        print(error)
"""
TORCH = ServiceConfig(engine="torch", task="score", memory_mb=10, model=Path("m"))
WHOLE_MB, PART_MB = 80_000, 20_000


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.gpu.devices._cuda_devices", list)


def test_a_machine_without_cuda_has_named_cpu_devices_with_the_declared_budget_or_a_share_of_half_the_memory(without_cuda: None) -> None:
    devices = discover(2, 512)
    assert [device.name for device in devices] == [f"cpu:{index} (no GPU here, computing on the CPU)" for index in range(2)]
    assert {(device.kind, device.memory_mb, device.torch_device) for device in devices} == {("cpu", 512, "cpu")}
    for cells, count in ((None, 1), (4, 4)):
        assert [device.memory_mb for device in discover(cells)] == [pytest.approx(usable_mb() / 2 / count, abs=1)] * count


def test_an_order_of_gpus_where_there_are_none_is_refused(without_cuda: None) -> None:
    with pytest.raises(DeviceError, match="gpu_order: 1,0 are declared, and no CUDA device is found here"):
        discover(order=[1, 0])


def test_torch_is_imported_for_neither_a_machine_without_a_driver_nor_stubs_and_is_named_where_it_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=200, cwd=ROOT)
    imported, *others = done.stdout.splitlines()
    assert (imported, done.stderr) == ("False", "")
    # Neither is it had on GPUs that only the driver lists
    assert ["services.t.engine: the torch engine needs the packages torch and transformers" in said for said in others] == [True, True]


@needs("torch")
def test_a_gpu_on_which_the_worker_gets_no_context_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def no_room(*_: object, **more: object) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory on {more['device']}")

    monkeypatch.setattr(torch, "ones", no_room)
    open_contexts([Device("cpu:0 (no GPU)", "cpu", 100, "cpu")], {"t": TORCH})
    with pytest.raises(DeviceError, match=r"cuda:3 \(made up\) cannot be used: OutOfMemoryError: CUDA out of memory on cuda:3"):
        open_contexts([gpu(3)], {"t": TORCH})


@pytest.fixture
def fake(with_nvml: Callable[[ModuleType], None]) -> FakeNvml:
    """Have a machine with a driver and NVML, and without torch."""
    module = FakeNvml("GPU-a0", "GPU-b1", "GPU-c2", "GPU-d3")
    with_nvml(module)
    return module


def numbers(devices: list[Device]) -> list[int]:
    return [int(device.uuid[-1]) for device in devices]


def test_gpus_are_cells_in_the_order_in_which_cuda_counts_them(fake: FakeNvml) -> None:
    devices = discover()
    assert numbers(devices) == [0, 1, 2, 3]
    assert devices[2] == Device("cuda:2 (H100)", "cuda", 80_000, "cuda:2", "GPU-c2")
    assert numbers(discover(2)) == [0, 1]


def test_the_order_may_be_declared(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANGRAM_GPU_ORDER", "3, 1,0")
    assert numbers(discover(order=Settings().gpu_order or None)) == [3, 1, 0]
    for order, problem in (([0, 0], "each device once"), ([4], "no CUDA device 4, this machine has 4"), ([], "each device once")):
        with pytest.raises(DeviceError, match=problem):
            discover(order=order)
    with pytest.raises(DeviceError, match="cells: 2 asked for, this machine has 1"):
        discover(2, order=[1])
    monkeypatch.setenv("TANGRAM_GPU_ORDER", "0,x")
    with pytest.raises(ValueError, match="valid integer"):
        Settings()


@pytest.mark.parametrize(
    ("said", "words"),
    [("3,GPU-b,1", ".* one that comes twice empties it"), ("4", "one that does not exist ends the list")],
)
def test_where_what_is_visible_names_no_gpu_that_is_said(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, said: str, words: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES={said} leaves no device: {words}"):
        discover()


def test_visible_gpus_are_numbered_in_the_order_in_which_they_are_named(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b,0")
    devices = discover()
    assert numbers(devices) == [3, 1, 0]
    assert [device.torch_device for device in devices] == ["cuda:0", "cuda:1", "cuda:2"]


def test_numbers_of_gpus_of_several_kinds_are_refused_where_cudas_order_is_unknown(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a faster GPU, which CUDA counts first, behind others on the bus
    fake.names = {uuid: b"H100" if uuid == "GPU-d3" else b"A100" for uuid in fake.uuids}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES=0: CUDA counts .* by their UUIDs, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        discover()
    # Then a UUID says which, and so does a declared order
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-d")
    assert discover() == [Device("cuda:0 (H100)", "cuda", 80_000, "cuda:0", "GPU-d3")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert numbers(discover()) == [0]


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


def test_without_a_driver_there_are_no_gpus(fake: FakeNvml) -> None:
    fake.driver = False
    assert (nvml.gpus(), discover()[0].kind) == (None, "cpu")


class FakeTorch(ModuleType):
    """torch as it sees one device: of a MIG device it says the memory, and the UUID of the whole GPU."""

    def __init__(self, name: str, uuid: str, memory_mb: int) -> None:
        super().__init__("torch")
        properties = SimpleNamespace(name=name, uuid=uuid, total_memory=memory_mb * MIB)
        self.cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, get_device_properties=lambda index: properties)


@pytest.fixture
def mig(with_nvml: Callable[[ModuleType], None]) -> FakeNvml:
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
    mig: FakeNvml, monkeypatch: pytest.MonkeyPatch, said: str, with_torch: bool
) -> None:
    if with_torch:
        on_mig(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    devices = discover()
    assert devices == [Device("cuda:0 (H100 MIG 2g.20gb)", "cuda", PART_MB, "cuda:0", "MIG-e1f")]
    assert command.visible({"CUDA_VISIBLE_DEVICES": said}, devices) == ["MIG-e1f"]
    assert NvmlMemory().used_mb(devices[0]) == NvmlMemory().total_mb(devices[0]) - 7.0


def test_without_nvml_the_name_of_a_mig_device_is_taken_as_it_is_given(mig: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
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
    mig: FakeNvml, monkeypatch: pytest.MonkeyPatch, said: str | None, words: str
) -> None:
    if said is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    with pytest.raises(DeviceError, match=f"^CUDA_VISIBLE_DEVICES{words}$"):
        discover()


def test_a_gpu_with_mig_on_which_no_mig_device_was_made_yet_is_refused(mig: FakeNvml) -> None:
    mig.parts["GPU-a1"] = []
    with pytest.raises(DeviceError, match="there is none yet"):
        discover()


def test_gpus_without_mig_beside_one_with_it_are_cells_once_their_uuids_are_given(mig: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,GPU-b2")
    assert [(device.uuid, device.memory_mb) for device in discover()] == [("GPU-c3", WHOLE_MB), ("GPU-b2", WHOLE_MB)]
    # And a machine on which MIG is only about to be enabled is as any other
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    mig.modes["GPU-a1"] = [0, 1]
    assert [device.uuid for device in discover()] == ["GPU-a1", "GPU-b2", "GPU-c3"]


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0", "NoDevFiles"])
def test_hidden_devices_are_not_asked_about_mig(mig: FakeNvml, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert discover()[0].kind == "cpu"


@pytest.mark.parametrize("said", ["3", "0,0", "GPU-x"])
def test_devices_that_torch_does_not_find_are_named_not_replaced_by_the_cpu(
    mig: FakeNvml, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    mig.modes = {}
    torch = FakeTorch("none", "", 0)
    torch.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES={said} leaves no device: .*torch must be built with CUDA"):
        discover()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert discover()[0].kind == "cpu"


def test_cells_carry_the_uuids_that_torch_gives_whatever_the_order(mig: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    mig.modes = {}
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("H100", "c3", WHOLE_MB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [device.uuid for device in discover()] == ["GPU-c3"]
