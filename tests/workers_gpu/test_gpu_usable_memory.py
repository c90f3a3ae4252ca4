"""The memory that a worker may use is bounded by its control group, in both versions and at every level."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from workers.memory import usable_mb

MIB = 1 << 20
ALL = psutil.virtual_memory().total // MIB
UNLIMITED_V1 = str((1 << 63) - 4096)


class Kernel:
    """Files as the kernel has them of a process and its control groups."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.proc.mkdir()
        self._mounts = folder / "sys"
        self._cgroup: list[str] = []
        self._mountinfo = ["22 1 0:20 / / rw,relatime shared:1 - ext4 /dev/root rw"]

    def group(self, version: int, path: str, limits: dict[str, str], root: str = "/") -> None:
        """Have the process in group `path`, seen through a mount of the group `root`; `limits` are by folder below the mount."""
        folder = self._mounts / str(version)
        kind, options, controllers = ("cgroup", "rw,memory", "4:memory") if version == 1 else ("cgroup2", "rw", "0:")
        self._cgroup.append(f"{controllers}:{path}")
        self._mountinfo.append(f"35 31 0:32 {root} {folder} rw,relatime - {kind} {kind} {options}")
        for below, limit in limits.items():
            (folder / below).mkdir(parents=True, exist_ok=True)
            (folder / below / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(limit + "\n")

    def usable_mb(self) -> int:
        (self.proc / "cgroup").write_text("\n".join(["9:name=systemd:/", "8:cpu,cpuacct:/x", *self._cgroup, ""]))
        (self.proc / "mountinfo").write_text("\n".join([*self._mountinfo, ""]))
        return usable_mb(self.proc)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("path", "limits", "root", "mb"),
    [
        ("/jobs/worker", {"jobs/worker": 64}, "/", 64),
        ("/a/b/c", {"a": 48, "a/b": 32, "a/b/c": 64}, "/", 32),
        ("/docker/0123", {".": 96}, "/docker/0123", 96),
        ("/../other", {".": 80}, "/", 80),
    ],
    ids=["the own group", "the smallest on the way up", "a container, whose own group is the root", "outside of the mount"],
)
def test_the_smallest_limit_above_counts(kernel: Kernel, version: int, path: str, limits: dict[str, int], root: str, mb: int) -> None:
    kernel.group(version, path, {below: str(limit * MIB) for below, limit in limits.items()}, root)
    assert kernel.usable_mb() == mb


@pytest.mark.parametrize(("version", "unlimited"), [(1, UNLIMITED_V1), (2, "max")])
def test_without_a_limit_it_is_the_machines_memory(kernel: Kernel, version: int, unlimited: str) -> None:
    kernel.group(version, "/a", {"a": unlimited})
    assert kernel.usable_mb() == ALL


def test_where_both_versions_are_mounted_the_smaller_limit_counts(kernel: Kernel) -> None:
    kernel.group(1, "/a", {"a": str(70 * MIB)})
    kernel.group(2, "/", {".": "max"})
    assert kernel.usable_mb() == 70


def test_without_control_groups_it_is_the_machines_memory(tmp_path: Path) -> None:
    assert usable_mb(tmp_path) == ALL


@pytest.fixture
def group() -> Iterator[Path]:
    """Make a control group with 300 MiB of memory and one inside it; give the inner one."""
    own = next((line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.split(":")[1] == "memory"), None)
    outer = Path(f"/sys/fs/cgroup/memory{own}") / f"tangram-test-{secrets.token_hex(4)}"
    try:
        (outer / "inner").mkdir(parents=True)
        (outer / "memory.limit_in_bytes").write_text(str(300 * MIB))
    except OSError as error:
        pytest.skip(f"a control group of version 1 cannot be made here: {error}")
    yield outer / "inner"
    (outer / "inner").rmdir()
    outer.rmdir()


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_cpu_devices_of_a_limited_worker_share_half_of_its_limit(group: Path) -> None:
    ask = "from workers.gpu.devices import discover; print([device.memory_mb for device in discover(2)])"
    words = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), sys.executable, "-c", ask]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.strip() == "[75, 75]"
