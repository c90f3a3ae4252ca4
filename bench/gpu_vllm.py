"""The checks of vLLM servers: two in turn on one GPU, residue, canaries, batching, and kills in each order.

With stand-ins the servers and the GPU are those of `tests/vllm`: residue that grows at first, graphs that come late, noise.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.local.processes import wait_until
from app.services_file import ServiceConfig
from bench.gpu_rows import Row, Setup, furthest, listed
from tests.vllm.fakes import CUDA, Fake, FakeDevices, fake_python
from workers.gpu.device_memory import DeviceMemory, device_memory
from workers.gpu.devices import Device, discover
from workers.gpu.engines.vllm.folders import end_leftovers
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName

CYCLES, LEAKED_PART, LEAKED_MB, LEAST_BATCHED, CLOSE = 6, 0.25, 512.0, 4.0, 0.05
CALLS = 64
GONE_S = 20.0
NAMES = ("judge", "teacher")
NATURE = {"model_mb": 3600, "context_mb": 200, "graphs_mb": 120, "growth_mb": [60, 30], "jitter_mb": 10, "noise": 1e-6}
_EACH_MB, _FAKE_MB = 16_000.0, 4_100.0
_ROOM_FOR_RESIDUE = 1.5
IDS = [[(7 * place) % 500 for place in range(64)]]


@dataclass
class Site:
    """A host of two vLLM services with memory for one, and what measures its device."""

    host: ServiceHost
    device: Device
    memory: DeviceMemory

    def used_mb(self) -> float:
        """Return what all processes hold of the device."""
        return self.memory.used_mb(self.device) or 0.0

    def servers(self) -> dict[str, psutil.Process]:
        """Return the processes of this worker's servers that listen, by service."""
        found = {}
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, ValueError):
                words = process.cmdline()
                if not any(word.endswith("guard.py") for word in words):
                    found[words[words.index("--served-model-name") + 1]] = process
        return found


def site(setup: Setup, small: bool = False) -> Site:
    """Make the host; `small` servers start fast and take little."""
    state_dir = setup.folder / "state"
    state_dir.mkdir(parents=True, exist_ok=True)
    if setup.stand_ins:
        return _fake_site(setup, state_dir)
    (device,) = discover(1)
    models = {"judge": ("score", setup.folder / "judge"), "teacher": ("logprobs", setup.folder / "teacher")}
    args = ["--max-model-len", "1024", *(["--enforce-eager", "--kv-cache-memory-bytes", "256M"] if small else [])]
    each_mb = 3_000.0 if small else _EACH_MB
    services = {
        name: ServiceConfig.model_validate(
            {
                "engine": "vllm",
                "task": task,
                "model": model,
                "memory_mb": each_mb,
                "max_concurrency": CALLS,
                "vllm": {"python": setup.vllm_python, "args": args, "start_timeout_s": 180.0},
            }
        )
        for name, (task, model) in models.items()
    }
    device = replace(device, memory_mb=int(min(device.memory_mb, _ROOM_FOR_RESIDUE * each_mb)))
    memory = device_memory([device])
    return Site(ServiceHost([device], services, state_dir, memory=memory), device, memory)


def _fake_site(setup: Setup, state_dir: Path) -> Site:
    devices = FakeDevices(setup.folder / "gpus", _ROOM_FOR_RESIDUE * _FAKE_MB)
    device = replace(CUDA[0], memory_mb=int(_ROOM_FOR_RESIDUE * _FAKE_MB))
    models = setup.folder.parent / "models"
    fakes = {}
    for number, name in enumerate(NAMES):
        (setup.folder / name).mkdir(exist_ok=True)
        fakes[name] = Fake(
            setup.folder / name,
            models,
            fake_python(setup.folder / name),
            nature={**NATURE, "seed": number},
            memory=devices,
        )
    tasks = {"judge": "score", "teacher": "logprobs"}
    services = {name: fake.config(tasks[name], memory_mb=_FAKE_MB, max_concurrency=CALLS) for name, fake in fakes.items()}
    return Site(ServiceHost([device], services, state_dir, memory=devices, drain_s=10.0), device, devices)


def make_models(setup: Setup, small: bool = False) -> None:
    """Write the models: of 3 GB, or tiny ones."""
    if setup.stand_ins or small:
        from app.tiny_models import make_services, make_tiny

        if setup.stand_ins:
            make_services(setup.folder.parent / "models")
        else:
            make_tiny(setup.folder / "judge", "reward")
            make_tiny(setup.folder / "teacher", "teacher")
        return
    import torch

    from bench.gpu_models import Shape, write

    for number, name in enumerate(NAMES):
        shape = Shape(2048, 8192, 24, 16, 4)
        write(setup.folder / name, shape, reward=name == "judge", seed=number, dtype=torch.bfloat16, device=setup.device)


def in_turn(setup: Setup) -> list[Row]:
    """Have two servers take turns on memory for one; measure times, residue, bookings, a spoilt wake, and batching."""
    make_models(setup)
    here = site(setup)
    before, host = here.used_mb(), here.host
    starts, evictions, wakes, residues, off = list[float](), list[float](), list[float](), list[float](), 0.0
    answers: dict[str, list[float]] = {}
    try:
        for cycle in range(CYCLES):
            for name in NAMES:
                took = host.ensure_resident(name, (0,))
                (wakes if cycle else starts).append(took)
                found = _ask(host, name)
                off = max(off, furthest(found, answers.setdefault(name, found)))
                began = time.perf_counter()
                host.evict(InstanceName(name, (0,)))
                evictions.append(time.perf_counter() - began)
            residues.append(here.used_mb() - before)
        booked = host.held_mb(0)
        statuses = {status.name.service: status for status in host.status()}
        killed = sum(status.starts for status in statuses.values()) - len(NAMES)
        spoilt = _spoil(here, answers["teacher"])
        rates = _batching(host)
    finally:
        host.close()
    left = here.used_mb() - before
    allowed = max(LEAKED_PART * max(residues[:3]), LEAKED_MB)
    grown = max(residues[3:]) - max(residues[:3])
    size = 0 if setup.stand_ins else sum(file.stat().st_size for file in (setup.folder / "teacher").glob("*.safetensors"))
    return [
        Row("vLLM: starts", ", ".join(f"{took:.1f} s" for took in starts)),
        Row("vLLM: sleeps and wakes, the medians", _rates(statistics.median(evictions), statistics.median(wakes), size)),
        Row(f"vLLM: two services in turn, {2 * CYCLES} turns", f"at most {off:.1e} off", f"≤ {CLOSE:g}", off <= CLOSE),
        Row("vLLM: healthy servers stopped in these turns", f"{killed}", "0", killed == 0),
        Row("vLLM: both asleep keep, by cycle", listed(residues), f"grows by ≤ {allowed:.0f} MiB after the third", grown <= allowed),
        Row(
            "vLLM: booked for both asleep",
            f"{booked:.0f} MiB, measured {residues[-1]:.0f}",
            f"within {allowed:.0f} MiB",
            abs(booked - residues[-1]) <= allowed,
        ),
        spoilt,
        Row(
            f"vLLM: {CALLS} calls, one by one and at once",
            f"{rates[0]:.0f} and {rates[1]:.0f} calls/s",
            f"≥ {LEAST_BATCHED:g} times",
            setup.judged(rates[1] >= LEAST_BATCHED * rates[0]),
        ),
        Row("vLLM: held once both are stopped", f"{left:.0f} MiB", "≤ 64 MiB", left <= 64.0),
    ]


def _ask(host: ServiceHost, name: str) -> list[float]:
    if name == "judge":
        items = [{"prompt": "What is 2 + 2?", "response": "4"}, {"prompt": "What is 2 + 3?", "response": "It is five."}]
        return host.run(name, (0,), lambda engine: engine.score(items))
    return host.run(name, (0,), lambda engine: engine.logprobs(IDS))[0]


def _rates(sleep_s: float, wake_s: float, size: int) -> str:
    said = f"{sleep_s:.2f} s and {wake_s:.2f} s"
    return f"{said}, {size / sleep_s / 1e9:.1f} and {size / wake_s / 1e9:.1f} GB/s of weights" if size else said


def _spoil(here: Site, answer: list[float]) -> Row:
    """Have the teacher's server lose its weights in its sleep, and ask it."""
    host = here.host
    socket = (words := here.servers()["teacher"].cmdline())[words.index("--uds") + 1]
    with httpx.Client(transport=httpx.HTTPTransport(uds=socket), base_url="http://vllm", timeout=60.0) as http:
        http.post("/wake_up").raise_for_status()
        # At level 2 the weights are thrown away, and whoever only wakes the server gets others.
        http.post("/sleep?level=2").raise_for_status()
    host.ensure_resident("teacher", (0,))
    off = furthest(_ask(host, "teacher"), answer)
    noticed = sum(status.wrong_answers for status in host.status())
    measured = f"{noticed} noticed, then {'the right answer' if off <= CLOSE else 'A WRONG ANSWER'}"
    return Row("vLLM: a server that lost its weights asleep", measured, "the right answer", off <= CLOSE)


def _batching(host: ServiceHost) -> tuple[float, float]:
    """Return calls per second, one after the other and all at once."""

    def ask(number: int) -> None:
        ids = [[(number + 11 * place) % 500 for place in range(128)]]
        host.run("teacher", (0,), lambda engine: engine.logprobs(ids))

    began = time.perf_counter()
    for number in range(CALLS):
        ask(number)
    apart = CALLS / (time.perf_counter() - began)
    with ThreadPoolExecutor(CALLS) as pool:
        began = time.perf_counter()
        list(pool.map(ask, range(CALLS, 2 * CALLS)))
        return apart, CALLS / (time.perf_counter() - began)


def killed(setup: Setup) -> list[Row]:
    """Kill worker, guard and server of six workers, in each order, and have the next worker of each name look."""
    orders = list(itertools.permutations(("worker", "guard", "server")))
    rows = []
    with ExitStack() as stack:
        folders = [setup.folder / "-".join(order) for order in orders]
        for folder in folders:
            folder.mkdir()
            make_models(replace(setup, folder=folder), small=True)
        before = [_used(replace(setup, folder=folder)) for folder in folders]
        workers = [stack.enter_context(_worker(replace(setup, folder=folder))) for folder in folders]
        pids = []
        for process in workers:
            line = process.stdout.readline() if process.stdout is not None else b""
            if not line:
                raise RuntimeError("a worker did not bring its service onto the GPU")
            pids.append(json.loads(line))
        held = _used(replace(setup, folder=folders[-1])) - before[-1]
        for order, folder, found, process in zip(orders, folders, pids, workers, strict=True):
            for what in order:
                with suppress(ProcessLookupError):
                    os.kill(found[what], signal.SIGKILL)
            process.wait()
            end_leftovers(folder / "state")
            left = _left(found)
            name = f"vLLM: killed {', then '.join(order)}"
            rows.append(Row(name, f"{len(left)} of {len(found['all'])} processes left", "0 left", not left))
        least = max(64.0, 0.01 * held)
        ends = [(replace(setup, folder=folder), most + least) for folder, most in zip(folders, before, strict=True)]
        back = wait_until(lambda: all(_used(end) <= most for end, most in ends), GONE_S)
    return [
        *rows,
        Row("vLLM: memory of killed servers", f"{held:.0f} MiB {'back' if back else 'NOT BACK'}", f"back within {GONE_S:g} s", back),
    ]


def _left(found: dict[str, Any]) -> list[int]:
    def living() -> list[int]:
        return [pid for pid in found["all"] if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    wait_until(lambda: not living(), GONE_S)
    return living()


def _used(setup: Setup) -> float:
    here = _memory(setup)
    return here[1].used_mb(here[0]) or 0.0


def _memory(setup: Setup) -> tuple[Device, DeviceMemory]:
    if setup.stand_ins:
        return CUDA[0], FakeDevices(setup.folder / "gpus", _ROOM_FOR_RESIDUE * _FAKE_MB)
    (device,) = discover(1)
    return device, device_memory([device])


def _worker(setup: Setup) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "bench.gpu_vllm", str(setup.folder), str(setup.vllm_python or "")]
    words += ["--stand-ins"] if setup.stand_ins else []
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def worker(setup: Setup) -> None:
    """Be a worker that is killed: bring a service onto the GPU, say which processes there are, and wait."""
    here = site(setup, small=True)
    here.host.ensure_resident("teacher", (0,))
    server = here.servers()["teacher"]
    below = [process.pid for process in server.children(recursive=True)]
    pids = {"worker": os.getpid(), "guard": server.ppid(), "server": server.pid}
    print(json.dumps({**pids, "all": [*pids.values(), *below]}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    worker(Setup(Path(sys.argv[1]), "--stand-ins" in sys.argv, Path(sys.argv[2]) if sys.argv[2] else None))
