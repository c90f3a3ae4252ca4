"""Devices of this machine: CPU devices, and the GPUs that a driver lists, in the order in which they are cells."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from app.services_file import ServiceConfig
from tangram.settings import Settings
from tests.lazily import needs
from tests.workers_gpu.cards import FakeNvml
from workers.gpu import nvml
from workers.gpu.devices import Device, discover, visible
from workers.gpu.engines.factory import open_contexts
from workers.gpu.errors import DeviceError
from workers.memory import usable_mb

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from workers.gpu import devices
devices.DRIVER_FILES = ("/nowhere",)
devices.discover(1, 100)
print("torch" in sys.modules)
sys.modules["torch"] = None
sys.modules["transformers"] = None
from pathlib import Path
from app.services_file import ConfigError, ServiceConfig
from workers.gpu.devices import Device, discover
from workers.gpu.engines.factory import open_contexts
from workers.gpu.host import ServiceHost
stub = ServiceConfig(engine="stub", task="score", memory_mb=10)
torch = ServiceConfig(engine="torch", task="score", memory_mb=10, model=Path("m"))
host = ServiceHost(discover(2, 100), {"s": stub}, Path("."))
host.ensure_resident("s", (1,))
print(len(host.run("s", (1,), lambda engine: engine.score([{"prompt": "p", "response": "r"}]))))
try:
    ServiceHost(discover(1, 100), {"t": torch}, Path("."))
except ConfigError as error:
    print(error)
gpus = [Device("cuda:0 (made up)", "cuda", 100, "cuda:0")]
open_contexts(gpus, {"s": stub})
try:
    open_contexts(gpus, {"s": stub, "t": torch})
except ConfigError as error:
    print(error)
"""


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
    assert done.returncode == 0, done.stderr
    imported, scores, *others = done.stdout.splitlines()
    assert (imported, scores) == ("False", "1")
    # Neither is it had on GPUs that only the driver lists
    assert ["services.t.engine: the torch engine needs the packages torch and transformers" in said for said in others] == [True, True]


@needs("torch")
def test_a_gpu_on_which_the_worker_gets_no_context_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def no_room(*_: object, **more: object) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory on {more['device']}")

    monkeypatch.setattr(torch, "ones", no_room)
    services = {"t": ServiceConfig(engine="torch", task="score", memory_mb=10, model=Path("m"))}
    open_contexts([Device("cpu:0 (no GPU)", "cpu", 100, "cpu")], services)
    with pytest.raises(DeviceError, match=r"cuda:3 \(made up\) cannot be used: OutOfMemoryError: CUDA out of memory on cuda:3"):
        open_contexts([Device("cuda:3 (made up)", "cuda", 100, "cuda:3")], services)


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
