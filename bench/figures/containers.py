"""Figures of environments that are containers, in an image of this machine's static busybox."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil

from bench.figures.registry import figure
from bench.figures.sandbox import SPIN, run_beyond_used_s
from bench.tools import NotMeasured, carry_out, one_core, peak_growth, under_way, used_s
from workers.cpu.abstract import EnvironmentSpec, ExecRequest, Holding
from workers.cpu.cores import CoreMap
from workers.cpu.docker.options import ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox

IMAGE = "tangram-figures-busybox:1"
WINDOW_S = 3.0
SUM = "i=0; s=0; while [ $i -lt 1000 ]; do s=$((s + i)); i=$((i + 1)); done; echo $s"
ENDLESS_REPORT = r"tr '\0' x </dev/zero | cat > $(echo /run/tangram/*/done)"


@figure("% of a core")
def container_leftovers() -> float:
    """Return CPU time of a process that an earlier command has left spinning in a container, while nothing runs."""
    marker = f"while :; do : {secrets.token_hex(8)}; done"
    with _sandbox() as box:
        one = box.open(EnvironmentSpec(id="figure"))
        carry_out(one, f"(sh -c '{marker}' >/dev/null 2>&1 &)")
        spinners = [each for each in psutil.process_iter() if _command_line(each)[-1:] == [marker]]
        if len(spinners) != 1:
            raise NotMeasured(f"{len(spinners)} processes look like the one that was left spinning")
        before = used_s(spinners[0])
        time.sleep(WINDOW_S)
        return 100 * (used_s(spinners[0]) - before) / WINDOW_S


@figure("MiB")
def container_report_growth() -> float:
    """Return growth of the worker's memory while a command writes a line without end to the pipe of reports."""
    with _sandbox() as box:
        one = box.open(EnvironmentSpec(id="figure"))
        carry_out(one, ":")
        with peak_growth() as growth:
            outcome = one.start(ExecRequest(action_id="figure", command=ENDLESS_REPORT, timeout_s=2.0)).wait()
            if outcome.status != "timed_out":
                raise NotMeasured(f"the command does not write on: {outcome.status}: {outcome.reason}")
            return growth()


@figure("s")
def container_neighbour() -> float:
    """Return slowest of a container's short commands on one core, while another container's command spins on the others."""
    *others, own = CoreMap.of_this_process().available
    if not others:
        raise NotMeasured("needs two cores")
    with _sandbox() as box:
        loud, quiet = (box.open(EnvironmentSpec(id=name)) for name in ("loud", "quiet"))
        with under_way(loud, " & ".join([SPIN] * 20), Holding(tuple(others))):
            return max(carry_out(quiet, SUM, Holding((own,))).execution_s for _ in range(40))


@figure("ms")
def container_background_time_error() -> float:
    """Return what a busy command in a container's background, beside others, ran for by its own count, beyond its CPU time."""
    with _sandbox(core_map=one_core()) as box:
        return 1e3 * run_beyond_used_s(box.open(EnvironmentSpec(id="figure")))


@contextmanager
def _sandbox(**more: object) -> Iterator[ContainerSandbox]:
    options = ContainerOptions(image=_image(), pull="never")
    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder:
        box = ContainerSandbox(Path(folder) / "box", node=f"tangram-figures-{os.getpid()}", options=options, **more)  # type: ignore[arg-type]
        try:
            yield box
        finally:
            box.close()


@cache
def _image() -> str:
    """Import an image whose only program is busybox, under the names of its tools."""
    program = shutil.which("busybox")
    if program is None or shutil.which("docker") is None:
        raise NotMeasured("needs Docker and a static busybox (Debian: busybox-static)")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        archive.add(program, "bin/busybox")
        for tool in subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split():
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, "/bin/busybox"
            if tool != "busybox":
                archive.addfile(link)
    made = subprocess.run(["docker", "import", "-", IMAGE], input=packed.getvalue(), capture_output=True, check=False)
    if made.returncode:
        raise NotMeasured(f"docker import: {made.stderr.decode().strip()}")
    return IMAGE


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []
