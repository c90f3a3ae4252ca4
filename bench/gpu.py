"""What the torch engine does on a real GPU: evictions that give memory back, restores at the speed of the link, many services.

`python -m bench.gpu` needs one CUDA GPU with 12 GB free, 20 GB of host memory and 16 GB of disk, and takes some minutes. All
models are random weights made in place. It prints one Markdown table and exits with 1 where a target is missed, with 2
where there is no CUDA. `--device cpu --small` runs the same code with small models on the CPU: a smoke test, in which only
right answers are asked for and the other figures mean little.

| figure | target | is |
|---|---|---|
| eviction returns | 95 % | of the memory that a service of 8.7 GB took on its device, what is free again once it is evicted |
| restore rate | 80 % | bytes over the time of a restore (the middle of five), against copies of pinned memory in the same run |
| twelve services | all | of a mixed stream to twelve services on memory for four: what equals plain transformers |

What an eviction returns is read twice, from the CUDA runtime and from NVML. The stream goes through the whole system.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

LEAST_RETURNED, LEAST_RATE, CLOSE = 0.95, 0.80, 1e-3
SERVICES, FIT, CALLERS = 12, 4, 8
SPARE_MB = 64
"""By how much the largest batch may differ from one start to the next."""
MIB = 1 << 20

Call = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; `met` is none where no target is judged."""

    name: str
    value: str
    target: str
    met: bool | None = None


def main(words: Sequence[str] | None = None) -> int:
    """Run `python -m bench.gpu`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Measure the torch engine on a GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where to measure")
    parser.add_argument("--small", action="store_true", help="small models and a short stream: a smoke test")
    asked = parser.parse_args(words)
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"the benchmark needs torch and transformers: {error}", file=sys.stderr)
        return 2
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu --small runs the same code on the CPU", file=sys.stderr)
        return 2
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="tangram-bench-gpu-") as folder:
        figures = [*one_service(Path(folder) / "one", asked.device, asked.small), *many_services(Path(folder), asked.device, asked.small)]
    print(f"{_machine(asked.device)}\n\n| figure | measured | target | |\n|---|---|---|---|")
    for figure in figures:
        print(f"| {figure.name} | {figure.value} | {figure.target} | {_mark(figure.met)} |")
    return 1 if any(figure.met is False for figure in figures) else 0


def one_service(folder: Path, device: str, small: bool) -> list[Figure]:
    """Start, evict and restore one service; measure what comes back and how fast."""
    import torch

    from bench.gpu_models import Shape, write
    from workers.gpu.devices import Device
    from workers.gpu.engines.torch_hf import TorchEngine

    _say("making a model")
    shape = Shape(256, 1024, 8, 8, 2) if small else Shape(4096, 14336, 20, 32, 8)
    size = write(folder, shape, reward=False, seed=0, dtype=torch.bfloat16, device=device)
    where = Device(device, "cuda" if device == "cuda" else "cpu", 1 << 20, "cuda:0" if device == "cuda" else "cpu")
    used = {"CUDA runtime": _cuda_used, "NVML": _nvml_used} if device == "cuda" else {"resident set": _process_used}
    _warm_up(folder.parent, where)
    before = {name: read() for name, read in used.items()}
    engine = TorchEngine("large", "logprobs", folder, folder.parent, dtype="bfloat16")
    ids = [[(7 * row + place) % 500 for place in range(16 if small else 256)] for row in range(4)]
    _say("starting, evicting and restoring it")
    engine.start([where])
    answers = engine.logprobs(ids)
    resident = {name: read() for name, read in used.items()}
    engine.evict()
    evicted = {name: read() for name, read in used.items()}
    times, same = [], True
    for _ in range(5):
        times.append(_seconds(lambda: engine.restore([where])))
        same = same and engine.logprobs(ids) == answers
        engine.evict()
    engine.stop()
    judged = device == "cuda"
    returned = [_returned(name, resident[name] - before[name], resident[name] - evicted[name], judged) for name in used]
    link = _link_rate(where.torch_device, 64 * MIB if small else 1 << 30)
    kept = Figure("answers after restores", "the same bits" if same else "other bits", "the same bits", same)
    return [*returned, *_rates(size, statistics.median(times), link, judged), kept]


def _returned(name: str, took: int, gave: int, judged: bool) -> Figure:
    part = gave / max(1, took)
    met = part >= LEAST_RETURNED if judged else None
    return Figure(f"eviction returns ({name})", f"{part:.1%} of {took / 1e9:.2f} GB", f"≥ {LEAST_RETURNED:.0%}", met)


def _rates(size: int, restore_s: float, link: float, judged: bool) -> list[Figure]:
    rate = size / restore_s
    met = rate / link >= LEAST_RATE if judged else None
    return [
        Figure("copies of pinned memory" if judged else "copies of memory", f"{link / 1e9:.1f} GB/s", ""),
        Figure(
            f"restore rate ({size / 1e9:.2f} GB in {restore_s:.3f} s)",
            f"{rate / 1e9:.1f} GB/s, {rate / link:.0%}",
            f"≥ {LEAST_RATE:.0%}",
            met,
        ),
    ]


def many_services(folder: Path, device: str, small: bool) -> list[Figure]:
    """Serve a mixed stream to twelve services through the whole system, and compare with plain transformers."""
    import torch

    from bench.gpu_models import Shape, write

    _say(f"making {SERVICES} models")
    shape = Shape(64, 128, 2, 2, 1) if small else Shape(1024, 4096, 8, 16, 4)
    names = [f"{'rm' if number % 2 else 'teacher'}-{number}" for number in range(SERVICES)]
    sizes = [
        write(folder / name, shape, reward=name.startswith("rm"), seed=number, dtype=torch.float32, device=device)
        for number, name in enumerate(names)
    ]
    each = max(_needed_mb(folder / name) for name in names[:2]) if device == "cuda" else max(sizes) // MIB + 2
    (folder / "services.toml").write_text("\n".join(_table(name, each) for name in names), encoding="utf-8")
    draws = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(SERVICES)]
    stream = [_call(draws, draws.choices(names, weights)[0]) for _ in range(40 if small else 600)]
    _say("asking plain transformers")
    expected = _expected(folder, stream, device)
    _say("serving the stream")
    answers, wall_s = _served(folder, stream, device, each)
    furthest = [_furthest(got, want) for got, want in zip(answers, expected, strict=True)]
    right = sum(distance <= CLOSE for distance in furthest)
    name = f"twelve services of {each} MiB on {FIT * each} MiB"
    return [
        Figure(name, f"{right} of {len(stream)} right, at most {max(furthest):.1e} off", f"all within {CLOSE:g}", right == len(stream)),
        Figure("the stream", f"{len(stream) / wall_s:.1f} calls/s of {CALLERS} callers", ""),
    ]


def _needed_mb(folder: Path) -> int:
    """Return the MiB that a model takes of a CUDA device, with the activations of the largest batch."""
    from workers.gpu.devices import Device
    from workers.gpu.engines.torch_hf import TorchEngine

    engine = TorchEngine(folder.name, "score" if folder.name.startswith("rm") else "logprobs", folder, folder.parent)
    engine.start([Device("cuda:0", "cuda", 1 << 20, "cuda:0")])
    held_mb = engine.memory_mb()
    engine.stop()
    return math.ceil(held_mb) + SPARE_MB


def _served(folder: Path, stream: Sequence[Call], device: str, each_mb: int) -> tuple[list[list[float]], float]:
    """Return the answers of a whole stack with memory for four services, and the seconds they took."""
    from app.local import stack
    from app.local.stack import StackPlan
    from tangram import Client, Settings

    cuda = device == "cuda"
    plan = StackPlan(
        nodes=0,
        api_nodes=0,
        cells=1 if cuda else FIT,
        cell_memory_mb=FIT * each_mb if cuda else each_mb,
        services_file=folder / "services.toml",
        variables={} if cuda else {"CUDA_VISIBLE_DEVICES": ""},
    )
    with stack.start(plan, folder / "state") as started:
        stack.wait_until_up(started, plan)
        with Client("bench", settings=stack.settings_of(started, Settings())) as client, ThreadPoolExecutor(CALLERS) as pool:
            began = time.perf_counter()
            answers = list(pool.map(lambda call: _asked(client, *call), stream))
            return answers, time.perf_counter() - began


def _furthest(got: Sequence[float], want: Sequence[float]) -> float:
    """Return the largest distance; infinite where there are not as many numbers, or one is none."""
    if len(got) != len(want) or any(math.isnan(value) for value in got):
        return math.inf
    return max((abs(one - other) for one, other in zip(got, want, strict=True)), default=0.0)


def _call(draws: random.Random, name: str) -> Call:
    """Draw what one call asks: a pair to score, or ids to give log-probs of."""
    if name.startswith("rm"):
        return name, {"prompt": f"What is {draws.randrange(100)} + {draws.randrange(100)}?", "response": str(draws.randrange(200))}
    return name, [draws.randrange(500) for _ in range(draws.randrange(8, 128))]


def _asked(client: Any, name: str, what: Any) -> list[float]:
    return list(client.score(name, [what]) if name.startswith("rm") else client.logprobs(name, [what])[0])


def _expected(folder: Path, stream: Sequence[Call], device: str) -> list[list[float]]:
    """Answer the calls with transformers, one model after the other, each input by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    out: dict[int, list[float]] = {}
    for name in sorted({name for name, _ in stream}):
        loader = AutoModelForSequenceClassification if name.startswith("rm") else AutoModelForCausalLM
        model = loader.from_pretrained(folder / name, dtype=torch.float32).eval().to(device)
        # Without a padding id, transformers reads the score at the last position of a single text.
        model.config.pad_token_id = None
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        for index, (asked, what) in enumerate(stream):
            if asked != name:
                continue
            text = [what] if isinstance(what, list) else [tokenizer(f"{what['prompt']}\n{what['response']}")["input_ids"]]
            ids = torch.tensor(text, device=device)
            with torch.inference_mode():
                logits = model(ids).logits[0].float()
            if isinstance(what, list):
                logits = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[0, 1:, None])[:, 0]
            out[index] = logits.tolist()
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    return [out[index] for index in range(len(stream))]


def _table(name: str, memory_mb: int) -> str:
    task = "score" if name.startswith("rm") else "logprobs"
    return f'[services.{name}]\nengine = "torch"\ntask = "{task}"\nmodel = "{name}"\nmemory_mb = {memory_mb}\nmax_concurrency = {CALLERS}\n'


def _warm_up(folder: Path, where: Any) -> None:
    """Have the device's context, libraries and kernels there, which are no service's: a tiny service comes and goes."""
    from app.tiny_models import make_tiny
    from workers.gpu.engines.torch_hf import TorchEngine

    engine = TorchEngine("tiny", "logprobs", make_tiny(folder / "tiny", "teacher"), folder, dtype="bfloat16")
    engine.start([where])
    engine.logprobs([[1, 2, 3]])
    engine.stop()


def _cuda_used() -> int:
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free


def _nvml_used() -> int:
    """Return the bytes in use as NVML says, through the tool that comes with every driver."""
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    words = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    for line in subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines():
        found, used = line.split(",")
        if found.strip().removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            return int(used) * MIB
    raise RuntimeError(f"nvidia-smi does not list the GPU {uuid}")


def _process_used() -> int:
    return int(psutil.Process(os.getpid()).memory_info().rss)


def _link_rate(device: str, size: int) -> float:
    """Return bytes per second of the best of ten copies of pinned memory to the device (on the CPU: of memory)."""
    import torch

    cuda = device != "cpu"
    source, target = torch.empty(size, dtype=torch.uint8, pin_memory=cuda), torch.empty(size, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize(device)

    copy()
    return size / min(_seconds(copy) for _ in range(10))


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _machine(device: str) -> str:
    import torch

    host = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 1e9:.0f} GB of memory, Python {platform.python_version()}"
    gpu = torch.cuda.get_device_name(0) if device == "cuda" else "no GPU asked for"
    return f"{gpu}; {host}, torch {torch.__version__}"


def _mark(met: bool | None) -> str:
    return "" if met is None else "met" if met else "MISSED"


def _say(what: str) -> None:
    print(f"{what} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
