"""Folders of made-up machines, as the kernel describes real ones below `/sys/devices/system`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Files = dict[str, str]


def put(system: Path, files: Files) -> Path:
    """Write files with a line of text each, and return the folder."""
    for name, text in files.items():
        path = system / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return system


def core_files(core: int, *, package: int = 0, siblings: str = "", cache: str = "") -> Files:
    """Return the files of one core; what is not given has no file."""
    folder = f"cpu/cpu{core}"
    files = {f"{folder}/topology/physical_package_id": str(package), f"{folder}/cache/index0/level": "1"}
    files[f"{folder}/cache/index0/shared_cpu_list"] = siblings or str(core)
    if siblings:
        files[f"{folder}/topology/core_cpus_list"] = siblings
    if cache:
        files |= {f"{folder}/cache/index3/level": "3", f"{folder}/cache/index3/shared_cpu_list": cache}
    return files


@pytest.fixture
def system(tmp_path: Path) -> Callable[[Files], Path]:
    """Return what makes a folder of a machine."""
    return lambda files: put(tmp_path / "system", files)


@pytest.fixture
def two_sockets(system: Callable[[Files], Path]) -> Path:
    """Return a server of two sockets with four cores of two threads each, numbered as Linux does: threads last."""
    files = {"node/node0/cpulist": "0-3,8-11", "node/node1/cpulist": "4-7,12-15", "cpu/online": "0-15"}
    for core in range(16):
        first = core % 8
        package = first // 4
        cache = "4-7,12-15" if package else "0-3,8-11"
        files |= core_files(core, package=package, siblings=f"{first},{first + 8}", cache=cache)
    return system(files)
