"""Devices of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app.services_file import ServiceConfig
from tests.lazily import needs
from workers.gpu.devices import Device, discover
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
    for count in (1, 4):
        assert [device.memory_mb for device in discover(count)] == [pytest.approx(usable_mb() / 2 / count, abs=1)] * count


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
