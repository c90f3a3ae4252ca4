"""How the memory of devices is measured: by NVML on GPUs, by the operating system beside CPU devices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.workers_gpu.cards import Cards, FakeNvml, gpu
from workers.gpu import nvml
from workers.gpu.device_memory import CpuMemory, NvmlMemory, device_memory, offered
from workers.gpu.devices import Device
from workers.gpu.errors import DeviceError

OURS, BESIDE, OTHER, ELSEWHERE = range(2, 6)
"""Process ids, of which all but the last one exist here."""

CPU = Device("cpu:0", "cpu", 1000, "cpu")


@pytest.fixture
def driver(with_nvml: Callable[[ModuleType], None]) -> FakeNvml:
    module = FakeNvml("GPU-0", "GPU-1")
    module.free_mb = {"GPU-0": 70_000, "GPU-1": 1000}
    with_nvml(module)
    return module


def test_a_gpu_is_measured_by_its_uuid(driver: FakeNvml) -> None:
    memory = device_memory([gpu(0), gpu(1)])
    assert [memory.total_mb(gpu(number)) for number in (0, 1)] == [80_000.0] * 2
    assert [memory.used_mb(gpu(number)) for number in (0, 1)] == [10_000.0, 79_000.0]
    with pytest.raises(DeviceError, match="the memory of the GPU GPU-7 cannot be read: Not Found"):
        memory.used_mb(gpu(7))


def test_gpu_memory_without_nvml_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml.library.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"cannot be measured: NVML or its Python binding \(the package nvidia-ml-py\) is not there"):
            NvmlMemory().used_mb(gpu())
    finally:
        nvml.library.cache_clear()


@pytest.mark.parametrize(
    ("listed", "held"),
    [
        ([(OURS, 700), (BESIDE, 800), (OTHER, 9999)], 1500.0),
        ([(OTHER, 9999)], None),
        ([], None),
        ([(OURS, None)], None),
        ([(OURS, 700), (ELSEWHERE, 9999)], None),
    ],
    ids=["ours and another's", "not ours", "none", "without memory", "one that does not exist here"],
)
def test_what_processes_hold_is_known_where_the_drivers_ids_are_ours(
    driver: FakeNvml, listed: list[Any], held: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.pid_exists", {OURS, BESIDE, OTHER}.__contains__)
    driver.processes = listed
    assert NvmlMemory().held_mb(gpu(), [OURS, BESIDE]) == held
    assert NvmlMemory().held_mb(gpu(), []) == 0.0


def test_beside_cpu_devices_a_process_holds_what_it_uses_and_the_device_has_only_a_budget() -> None:
    code = "import sys; block = bytearray(b'x') * (64 << 20); print('up', flush=True); sys.stdin.read()"
    memory = device_memory([CPU])
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        held = memory.held_mb(CPU, [child.pid])
        assert held is not None and 64.0 < held < 128.0
        child.communicate()
    assert (CpuMemory().held_mb(CPU, [child.pid]), memory.used_mb(CPU)) == (0.0, None)


def test_a_cell_offers_what_is_free_of_it_or_what_is_declared(caplog: pytest.LogCaptureFixture) -> None:
    cards = Cards(10_000, used={"GPU-0": 600.5})
    devices = [gpu(0), gpu(1)]
    assert [device.memory_mb for device in offered(devices, cards, None)] == [9399, 10_000]
    assert [device.memory_mb for device in offered(devices, cards, 9500)] == [9500, 9500]
    assert [record.message for record in caplog.records] == ["cuda:0 (made up): 9500 MiB are declared, and 9399 are free"]
    assert offered([CPU], CpuMemory(), None) == [CPU]
