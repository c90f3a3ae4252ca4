"""How memory is measured: through `nvidia-smi`, here a program that answers as it does, and for processes on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from workers.gpu.engines.vllm.memory import GpuMeter, HostMeter

_SMI = """#!/bin/sh
case "$*" in
  *query-compute-apps*) cat {folder}/apps;;
  *memory.used*) cat {folder}/used;;
  *memory.total*) cat {folder}/total;;
esac
echo "$@" >> {folder}/asked
"""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(_SMI.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "used").write_text("1000\n2000\n")
    (tmp_path / "total").write_text("81559\n40960\n")
    (tmp_path / "apps").write_text("")
    return tmp_path


def test_the_smallest_of_the_devices_counts(smi: Path) -> None:
    assert GpuMeter().device_mb(["4", "5"]) == 40_960.0
    assert "--id=4,5" in (smi / "asked").read_text()


def test_what_the_driver_says_of_a_servers_processes_is_summed(smi: Path) -> None:
    meter, me = GpuMeter(), psutil.Process()
    meter.begin(["4", "5"])
    (smi / "apps").write_text(f"{me.pid}, 700\n{me.pid}, 800\n1, 9999\n")
    assert meter.held_mb([me]) == 1500.0
    assert meter.held_mb([]) == 0.0


@pytest.mark.parametrize("apps", ["", "4711, 9999\n", "4711, [N/A]\n"])
def test_where_the_driver_does_not_know_our_processes_what_the_devices_hold_more_counts(smi: Path, apps: str) -> None:
    meter = GpuMeter()
    meter.begin(["4", "5"])
    (smi / "apps").write_text(apps)
    (smi / "used").write_text("6000\n2500\n")
    assert meter.held_mb([psutil.Process()]) == 5500.0


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="nvidia-smi is not on PATH"):
        GpuMeter().device_mb(["0"])


def test_on_the_cpu_a_process_holds_what_it_uses() -> None:
    code = "import sys; block = bytearray(b'x') * (64 << 20); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert 64.0 < HostMeter().held_mb([psutil.Process(child.pid)]) < 128.0
        child.communicate()
