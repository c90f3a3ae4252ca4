"""The checks of the torch engine: evictions, restores, canaries, merged calls, services in turn, and a worker that is killed."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from app.local.processes import wait_until
from bench.gpu_models import Shape, write
from bench.gpu_rows import Row, Setup, cuda_used_mb, furthest, listed, process_mb
from bench.merging import rates
from bench.tools import MIB, running, wait_s
from workers.gpu.device_memory import device_memory
from workers.gpu.devices import Device, discover
from workers.gpu.engines.host_copy import FileCopy, PinnedCopy
from workers.gpu.engines.loading import Dtype
from workers.gpu.engines.torch_hf import TorchEngine
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName

LEAST_RETURNED, LEAST_RATE, LEAST_MERGED, CLOSE = 0.95, 0.80, 2.0, 1e-3
LEAKED_MB = 512.0
SPARE_MB = 64
"""By how much the largest batch may differ from one start to the next."""
SERVICES, CALLERS, TURNS, RESTORES = 3, 8, 6, 5

Call = tuple[str, Any]

transformers.utils.logging.disable_progress_bar()


def one_service(setup: Setup) -> list[Row]:
    """Start, evict and restore a large service; measure what comes back and how fast."""
    shape = Shape(256, 1024, 8, 8, 2) if setup.stand_ins else Shape(4096, 14336, 10, 32, 8)
    size = write(
        setup.folder / "large", shape, reward=False, seed=0, dtype=torch.float32 if setup.stand_ins else torch.bfloat16, device=setup.device
    )
    (where,) = discover(1)
    memory = device_memory([where])
    used: dict[str, Callable[[], float]] = {"resident set": process_mb}
    if not setup.stand_ins:
        used = {"CUDA runtime": cuda_used_mb, "NVML": lambda: memory.used_mb(where) or 0.0}
    _warm_up(setup.folder, where)
    before = {name: read() for name, read in used.items()}
    # Short numbers are slow on CPUs.
    dtype: Dtype = "float32" if setup.stand_ins else "bfloat16"
    engine = TorchEngine("large", "logprobs", setup.folder / "large", setup.folder, dtype=dtype)
    ids = [[(7 * row + place) % 500 for place in range(16 if setup.stand_ins else 256)] for row in range(4)]
    engine.start([where])
    answers = engine.logprobs(ids)
    resident = {name: read() for name, read in used.items()}
    evictions, restores, same = [wait_s(engine.evict)], list[float](), True
    evicted = {name: read() for name, read in used.items()}
    copies = list[float]()
    for _ in range(RESTORES):
        with _loading(lambda load: copies.append(wait_s(load))):
            restores.append(wait_s(lambda: engine.restore([where])))
        same = same and engine.logprobs(ids) == answers
        evictions.append(wait_s(engine.evict))
    engine.stop()
    rows = []
    for name in used:
        part = (resident[name] - evicted[name]) / max(1.0, resident[name] - before[name])
        took = f"{part:.1%} of {(resident[name] - before[name]) * MIB / 1e9:.2f} GB"
        rows.append(Row(f"torch: an eviction returns ({name})", took, f"≥ {LEAST_RETURNED:.0%}", setup.judged(part >= LEAST_RETURNED)))
    link, rate = _link_rate(where.torch_device, 64 * MIB if setup.stand_ins else 1 << 30), size / statistics.median(copies)
    rows += [
        Row("torch: copies of pinned memory, the rate of the link", f"{link / 1e9:.1f} GB/s"),
        Row("torch: evictions, the first and the median of the others", f"{evictions[0]:.3f} s, {statistics.median(evictions[1:]):.3f} s"),
        Row(
            f"torch: restores of {size / 1e9:.2f} GB",
            f"{statistics.median(restores):.3f} s with canaries; copied at {rate / 1e9:.1f} GB/s, {rate / link:.0%} of the link",
            f"≥ {LEAST_RATE:.0%}",
            setup.judged(rate / link >= LEAST_RATE),
        ),
        Row("torch: answers after restores", "the same bits" if same else "other bits", "the same bits", same),
    ]
    return rows


def in_turn(setup: Setup) -> list[Row]:
    """Have two services take turns on memory for one, bring one back spoilt, and ask one from many threads."""
    shape = Shape(64, 128, 2, 2, 1) if setup.stand_ins else Shape(2048, 8192, 8, 16, 4)
    names = ["one", "two"]
    for number, name in enumerate(names):
        write(setup.folder / name, shape, reward=False, seed=number, dtype=torch.float32, device=setup.device)
    each = _needed_mb(setup, setup.folder / "one")
    host = _host(setup, {name: setup.folder / name for name in names}, each)
    used = process_mb if setup.stand_ins else cuda_used_mb
    ids = [[(7 * place) % 500 for place in range(64)]]
    answers, residues, same = dict[str, Any](), list[float](), True
    for _ in range(TURNS):
        for name in names:
            host.ensure_resident(name, (0,), host.in_the_way(name, (0,)))
            found = host.run(name, (0,), lambda engine: engine.logprobs(ids))
            same = same and answers.setdefault(name, found) == found
        host.evict(InstanceName("two", (0,)))
        residues.append(used())
    grown = residues[-1] - residues[min(2, TURNS - 1)]
    with _loading(lambda load: load(), spoil=True):
        host.ensure_resident("one", (0,))
    right = host.run("one", (0,), lambda engine: engine.logprobs(ids)) == answers["one"]
    wrong = sum(status.wrong_answers for status in host.status())
    calls = rates(host.run("one", (0,), lambda engine: engine), 16, 5 if setup.stand_ins else 25, 64)
    host.close()
    apart, merged = calls
    return [
        Row(f"torch: two services in turn, {2 * TURNS} turns", "the same bits" if same else "other bits", "the same bits", same),
        Row(
            "torch: used once both are evicted, more than at first",
            listed([mb - residues[0] for mb in residues]),
            f"grows by ≤ {LEAKED_MB:.0f} MiB after the third",
            setup.judged(grown <= LEAKED_MB),
        ),
        Row(
            "torch: a spoilt restore",
            f"{wrong} noticed, then {'the right answer' if right else 'A WRONG ANSWER'}",
            "noticed, right answer",
            wrong == 1 and right,
        ),
        Row(
            "torch: 16 calls at once, one by one and merged",
            f"{apart:.0f} and {merged:.0f} calls/s",
            f"≥ {LEAST_MERGED:g} times",
            setup.judged(merged >= LEAST_MERGED * apart),
        ),
    ]


def three_services(setup: Setup) -> list[Row]:
    """Serve a mixed stream to three services on memory for one through the whole system, and compare with plain transformers."""
    shape = Shape(64, 128, 2, 2, 1) if setup.stand_ins else Shape(1024, 4096, 8, 16, 4)
    names = [f"{'rm' if number % 2 else 'teacher'}-{number}" for number in range(SERVICES)]
    for number, name in enumerate(names):
        write(setup.folder / name, shape, reward=name.startswith("rm"), seed=number, dtype=torch.float32, device=setup.device)
    each = max(_needed_mb(setup, setup.folder / name) for name in names[:2])
    (setup.folder / "services.toml").write_text("\n".join(_table(name, each) for name in names), encoding="utf-8")
    draws = random.Random(0)
    stream = [_call(draws, draws.choice(names)) for _ in range(30 if setup.stand_ins else 300)]
    expected = _expected(setup.folder, stream, setup.device)
    answers, wall_s = _served(setup, stream, each)
    off = [furthest(got, want) for got, want in zip(answers, expected, strict=True)]
    right = sum(distance <= CLOSE for distance in off)
    rate = f"{len(stream) / wall_s:.1f} calls/s of {CALLERS} callers"
    measured = f"{right} of {len(stream)} right, at most {max(off):.1e} off, {rate}"
    return [Row(f"torch: {SERVICES} services on memory for one, through the whole system", measured, "all right", right == len(stream))]


def killed(setup: Setup) -> list[Row]:
    """Kill a worker whose service is resident; its memory must come back."""
    shape = Shape(64, 128, 2, 2, 1) if setup.stand_ins else Shape(2048, 8192, 8, 16, 4)
    write(setup.folder / "one", shape, reward=False, seed=0, dtype=torch.float32, device=setup.device)
    (where,) = discover(1)
    memory = device_memory([where])
    words = [sys.executable, "-m", "bench.gpu_torch", str(setup.folder), *(["--stand-ins"] if setup.stand_ins else [])]
    before = memory.used_mb(where)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:

        def taken_mb() -> float:
            used = memory.used_mb(where)
            return (memory.held_mb(where, [worker.pid]) or 0.0) if used is None or before is None else used - before

        if worker.stdout is None or worker.stdout.readline() != b"resident\n":
            worker.kill()
            raise RuntimeError("the worker did not bring its service onto the GPU")
        held = taken_mb()
        worker.kill()
        began = time.monotonic()
        worker.wait()
    back = wait_until(lambda: taken_mb() <= max(64.0, 0.01 * held), 15.0)
    measured = f"{held:.0f} MiB {'back' if back else 'NOT BACK'} after {time.monotonic() - began:.1f} s"
    return [Row("torch: memory of a worker that is killed", measured, "back within 15 s", back)]


def worker(folder: Path, stand_ins: bool) -> None:
    """Be the worker that is killed."""
    setup = Setup(folder, stand_ins)
    host = _host(setup, {"one": folder / "one"}, _needed_mb(setup, folder / "one"))
    host.ensure_resident("one", (0,))
    host.run("one", (0,), lambda engine: engine.logprobs([[1, 2, 3]]))
    print("resident", flush=True)
    sys.stdin.read()


def _host(setup: Setup, folders: dict[str, Path], each_mb: float) -> ServiceHost:
    """Return a host of services of `each_mb` MiB on one device with memory for one of them."""
    from app.services_file import ServiceConfig

    services = {
        name: ServiceConfig(engine="torch", task="logprobs", model=folder, memory_mb=each_mb, max_concurrency=16, dtype="float32")
        for name, folder in folders.items()
    }
    return ServiceHost(discover(1, int(each_mb)), services, setup.folder)


def _needed_mb(setup: Setup, folder: Path) -> int:
    """Return the MiB that a model takes of its device: weights, and on a GPU the activations of the largest batch."""
    engine = TorchEngine(folder.name, "score" if folder.name.startswith("rm") else "logprobs", folder, setup.folder, dtype="float32")
    engine.start(discover(1))
    held_mb = engine.memory_mb()
    engine.stop()
    return math.ceil(held_mb) + SPARE_MB


@contextmanager
def _loading(around: Callable[[Callable[[], None]], None], spoil: bool = False) -> Iterator[None]:
    """Have each copy of weights onto devices go through `around`; to `spoil` is to zero a part of the first, as if it had failed."""
    kinds, left = [FileCopy, PinnedCopy], [True] if spoil else []
    loads = [kind.load for kind in kinds]

    def changed(load: Callable[[Any, Sequence[torch.Tensor]], None]) -> Callable[[Any, Sequence[torch.Tensor]], None]:
        def loading(copy: Any, blocks: Sequence[torch.Tensor]) -> None:
            around(lambda: load(copy, blocks))
            if left and left.pop():
                for block in blocks:
                    block[block.numel() // 2 :].zero_()

        return loading

    for kind, load in zip(kinds, loads, strict=True):
        kind.load = changed(load)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, load in zip(kinds, loads, strict=True):
            kind.load = load  # type: ignore[method-assign]


def _served(setup: Setup, stream: Sequence[Call], each_mb: int) -> tuple[list[list[float]], float]:
    """Return the answers of a whole stack with memory for one service, and the seconds they took."""
    from app.local import stack
    from app.local.stack import StackPlan
    from tangram import Client, Settings

    plan = StackPlan(
        nodes=0,
        api_nodes=0,
        cells=1,
        cell_memory_mb=each_mb,
        services_file=setup.folder / "services.toml",
        variables={"CUDA_VISIBLE_DEVICES": ""} if setup.stand_ins else {},
    )
    with running(plan) as started, Client("check", settings=stack.settings_of(started, Settings())) as client:
        began = time.perf_counter()
        with ThreadPoolExecutor(CALLERS) as pool:
            answers = list(pool.map(lambda call: _asked(client, *call), stream))
        return answers, time.perf_counter() - began


def _call(draws: random.Random, name: str) -> Call:
    """Draw what one call asks: a pair to score, or ids to give log-probs of."""
    if name.startswith("rm"):
        return name, {"prompt": f"What is {draws.randrange(100)} + {draws.randrange(100)}?", "response": str(draws.randrange(200))}
    return name, [draws.randrange(500) for _ in range(draws.randrange(8, 128))]


def _asked(client: Any, name: str, what: Any) -> list[float]:
    return list(client.score(name, [what]) if name.startswith("rm") else client.logprobs(name, [what])[0])


def _expected(folder: Path, stream: Sequence[Call], device: str) -> list[list[float]]:
    """Answer the calls with transformers, one model after the other, each input by itself."""
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
        if device != "cpu":
            torch.cuda.empty_cache()
    return [out[index] for index in range(len(stream))]


def _table(name: str, memory_mb: int) -> str:
    task = "score" if name.startswith("rm") else "logprobs"
    table = f'[services.{name}]\nengine = "torch"\ntask = "{task}"\nmodel = "{name}"\nmemory_mb = {memory_mb}\n'
    return f'{table}max_concurrency = {CALLERS}\ndtype = "float32"\n'


def _warm_up(folder: Path, where: Device) -> None:
    """Have the device's context, libraries and kernels there, which are no service's: a tiny service comes and goes."""
    from app.tiny_models import make_tiny

    engine = TorchEngine("tiny", "logprobs", make_tiny(folder / "tiny", "teacher"), folder, dtype="bfloat16")
    engine.start([where])
    engine.logprobs([[1, 2, 3]])
    engine.stop()


def _link_rate(device: str, size: int) -> float:
    """Return bytes per second of the best of ten copies of pinned memory to the device (on the CPU: of memory)."""
    cuda = device != "cpu"
    source, target = torch.empty(size, dtype=torch.uint8, pin_memory=cuda), torch.empty(size, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if cuda:
            torch.cuda.synchronize(device)

    copy()
    return size / min(wait_s(copy) for _ in range(10))


if __name__ == "__main__":
    worker(Path(sys.argv[1]), "--stand-ins" in sys.argv)
