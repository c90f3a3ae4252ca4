"""The kinds of engine that the suite tests, with one table of what each can, and the faults that it can be given.

A test names the engines by what they can: `@engines()` is every one, `@engines(moves=True)` those whose copy may come back elsewhere.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from app.services_file import ServiceConfig
from tests.engines.reference import expected_logprobs, real_python, scores_of_texts
from tests.vllm import fakes
from tests.vllm.fakes import Fake, fake_python
from workers.gpu.call_control import CallControl
from workers.gpu.device_memory import CpuMemory
from workers.gpu.devices import Device
from workers.gpu.engines.abstract import Engine
from workers.gpu.engines.canary import Answer, Answers
from workers.gpu.engines.factory import create_engine
from workers.gpu.engines.stub import StubEngine
from workers.gpu.errors import CallFailed
from workers.gpu.host import ServiceHost

Task = Literal["score", "logprobs"]
MODELS: dict[Task, str] = {"score": "rm-small", "logprobs": "teacher-0"}
CPUS = [Device(f"cpu:{number}", "cpu", 1000, "cpu") for number in range(3)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Can:
    """What a kind of engine can and cannot."""

    made: bool = True
    """It is cheap to make, so a test may have one of its own, with faults; otherwise tests share one for each task."""
    computes: bool = True
    """It computes with the weights of a model folder, within the model's vocabulary and length."""
    transformers: bool = False
    """Its answers are those of transformers."""
    moves: bool = False
    """Its copy, here a file, may come back on other devices, and on more; otherwise its server keeps it in host memory."""
    cancels_at_once: bool = True
    """A call that is computed ends as soon as it is cancelled; otherwise after its batch."""
    longest: int = 512
    """Ids of the longest sequence whose log-probs it gives."""
    keeps_mb: float = 0.0
    """What it holds of its device while it is in host memory."""
    close: float = 0.0
    """By how much its answers may differ from right ones, and from those of another batch."""


CAN = {
    "stub": Can(computes=False, moves=True),
    "torch": Can(transformers=True, moves=True, cancels_at_once=False, close=1e-4),
    "made-up vllm": Can(longest=511, keeps_mb=300.0),
    "vllm": Can(made=False, transformers=True, longest=511, close=1e-4),
}


def engines(**wanted: object) -> pytest.MarkDecorator:
    """Run a test with the engines that can what is wanted; it gets each as `kind`."""
    assert wanted.keys() <= {one.name for one in fields(Can)}
    names = [name for name, can in CAN.items() if all(getattr(can, what) == value for what, value in wanted.items())]
    # A real server takes minutes to start on a busy machine.
    marked = [pytest.param(name, marks=() if CAN[name].made else (pytest.mark.real, pytest.mark.timeout(900))) for name in names]
    return pytest.mark.parametrize("kind", marked, indirect=True)


class Kind(ABC):
    """Makes engines of one kind, in a folder of its own."""

    name: str
    devices: Sequence[Device] = CPUS

    def __init__(self, models: Path, folder: Path, patch: pytest.MonkeyPatch, shelf: Shelf) -> None:
        self.models, self.folder, self.patch, self.shelf = models, folder, patch, shelf
        self.can = CAN[self.name]
        self._made: list[Engine] = []
        (folder / "state").mkdir(parents=True, exist_ok=True)

    def shared(self, task: Task) -> Engine:
        """Return a resident engine that others use, too: leave it as it is."""
        return self.shelf.engine(self.name, task)

    def make(self, task: Task = "score", **table: Any) -> Engine:
        """Return an absent engine for the service `rm`, declared as said."""
        return self.create("rm", self.config(task, **table))

    def started(self, task: Task = "score", **table: Any) -> Engine:
        """Return a resident engine on one device."""
        made = self.make(task, **table)
        made.start(self.devices[:1])
        return made

    def host(self, task: Task) -> ServiceHost:
        """Return the host of the service `rm`."""
        return ServiceHost(self.devices, {"rm": self.config(task)}, self.folder, factory=self.create)

    def create(self, name: str, config: ServiceConfig, *_: object) -> Engine:
        """Make an engine as hosts have them made."""
        self._made.append(create_engine(name, config, self.folder / "state", CpuMemory()))
        return self._made[-1]

    def config(self, task: Task = "score", **table: Any) -> ServiceConfig:
        """Return the table of a service."""
        said = {"engine": self.name, "task": task, "model": self.models / MODELS[task], "memory_mb": 500.0, "max_concurrency": 4}
        return ServiceConfig.model_validate({**said, "cells": [1, 2], **table})

    def servers(self) -> list[int]:
        """Return the servers that were started, where it has any."""
        return []

    def close(self) -> None:
        """Stop what was made."""
        for engine in self._made:
            engine.stop()

    @abstractmethod
    def expected_scores(self, texts: Sequence[str]) -> list[float]:
        """Score whole texts otherwise."""

    @abstractmethod
    def expected_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Compute log-probs otherwise."""

    @contextmanager
    def holding(self) -> Iterator[Callable[[], None]]:
        """Have scores that are computed wait, until the block ends or calls what it is given."""
        gate = threading.Event()
        try:
            self.hold(gate)
            yield gate.set
        finally:
            gate.set()

    def hold(self, gate: threading.Event) -> None:
        """Have scores that are computed wait for the gate."""
        raise NotImplementedError

    def spoil(self) -> None:
        """Have the next restore bring back other weights."""
        raise NotImplementedError

    def no_numbers(self) -> None:
        """Have weights whose scores are no numbers."""
        raise NotImplementedError

    def refuse(self) -> None:
        """Have no more question answered: "not this one"."""
        raise NotImplementedError


def fail(value: float) -> float:
    """Be what becomes of an answer that is refused."""
    raise CallFailed("not this one")


class Stub(Kind):
    """The engine without a model; no other computes its answers."""

    name = "stub"
    expected_scores = expected_logprobs = None  # type: ignore[assignment]

    def hold(self, gate: threading.Event) -> None:
        def wait(engine: StubEngine, control: CallControl) -> None:
            while not gate.wait(0.005):
                control.check()

        self.patch.setattr(StubEngine, "_take_time", wait)

    def spoil(self) -> None:
        values = [lambda value: math.nextafter(value, 0.0)]
        self._answer(lambda value: values.pop()(value) if values else value, "restoring")

    def no_numbers(self) -> None:
        self._answer(lambda value: math.nan, "starting")

    def refuse(self) -> None:
        self._answer(fail, "restoring")

    def _answer(self, change: Callable[[float], float], state: str) -> None:
        """Have fixed questions answered otherwise in a state."""
        real = StubEngine._canary

        def canary(engine: StubEngine) -> list[Answers]:
            (said,) = real(engine)
            return [tuple(Answer(tuple(map(change, one.values))) for one in said)] if engine.state == state else [said]

        self.patch.setattr(StubEngine, "_canary", canary)


class Torch(Kind):
    """The model in this process."""

    name = "torch"

    def expected_scores(self, texts: Sequence[str]) -> list[float]:
        return scores_of_texts(self.models / MODELS["score"], texts)

    def expected_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return expected_logprobs(self.models / MODELS["logprobs"], sequences)

    def hold(self, gate: threading.Event) -> None:
        # A batch for each item, so that a call takes several.
        self.patch.setattr("workers.gpu.engines.torch_hf._BATCH_TOKENS", 8)
        self._scores(lambda value: value if gate.wait(60) else math.nan)

    def no_numbers(self) -> None:
        self._scores(lambda value: math.nan)

    def refuse(self) -> None:
        self._scores(fail)

    def _scores(self, change: Callable[[float], float]) -> None:
        from workers.gpu.engines import compute

        real = compute.scores
        self.patch.setattr(compute, "scores", lambda *asked: [change(value) for value in real(*asked)])

    def spoil(self, replica: int = 0, part: float = 0.5) -> None:
        """Change the sign of one weight in what one device gets of a host copy, once."""
        from workers.gpu.engines.host_copy import FileCopy

        real, armed = FileCopy.load, [True]

        def load(copy: FileCopy, blocks: Sequence[Any]) -> None:
            real(copy, blocks)
            if armed:
                # The last byte of a float32, which is little-endian here.
                blocks[replica][int(part * blocks[replica].numel()) // 4 * 4 + 3] ^= 0x80
                armed.clear()

        self.patch.setattr(FileCopy, "load", load)


class MadeUpVllm(Kind):
    """The engine behind a server, of which the server is made up: it answers sums."""

    name = "made-up vllm"
    devices = fakes.CUDA

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.fake = Fake(self.folder, self.models, fake_python(self.folder))

    def config(self, task: Task = "score", **table: Any) -> ServiceConfig:
        return self.fake.config(task, **table)

    def create(self, name: str, config: ServiceConfig, *_: object) -> Engine:
        self._made.append(self.fake.make(name, config, self.folder, self.fake.memory))
        return self._made[-1]

    def host(self, task: Task) -> ServiceHost:
        return ServiceHost(self.devices, {"rm": self.config(task)}, self.folder, factory=self.create, memory=self.fake.memory)

    def servers(self) -> list[int]:
        return self.fake.servers()

    def expected_scores(self, texts: Sequence[str]) -> list[float]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.models / MODELS["score"])
        return [fakes.summed(tokenizer(text)["input_ids"]) for text in texts]

    def expected_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return [[-fakes.summed(ids[:end]) for end in range(2, len(ids) + 1)] for ids in sequences]

    @contextmanager
    def holding(self) -> Iterator[Callable[[], None]]:
        def release() -> None:
            (self.folder / "hang").unlink(missing_ok=True)

        self.fake.be("hang")
        try:
            yield release
        finally:
            release()

    def spoil(self) -> None:
        self.fake.be("spoil")

    def no_numbers(self) -> None:
        (self.folder / "weights").write_text(f"[{', '.join(['NaN'] * 512)}]")

    def refuse(self) -> None:
        self.fake.be("refuse")


class RealVllm(Torch):
    """vLLM itself on the CPU."""

    name = "vllm"
    devices = (Device("cpu:0", "cpu", 4000, "cpu"),)

    def config(self, task: Task = "score", **table: Any) -> ServiceConfig:
        vllm = {"python": real_python(), "sleep_on_cpu": True, "start_timeout_s": 600.0, "args": ["--max-model-len", "512"]}
        return super().config(task, **{"memory_mb": 3000.0, "dtype": "float32", "vllm": vllm, **table})


KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in (Stub, Torch, MadeUpVllm, RealVllm)}


class Shelf:
    """Resident engines that the tests of a session share, made when they are asked for."""

    def __init__(self, models: Path, folder: Path) -> None:
        self._models, self._folder = models, folder
        self._kinds: list[Kind] = []
        self._engines: dict[tuple[str, Task], Engine] = {}

    def engine(self, name: str, task: Task) -> Engine:
        """Return the engine of a kind and task. Where making one takes long, those of all tasks are made at once, on a core each."""
        if (name, task) not in self._engines:
            tasks = (task,) if CAN[name].made else tuple(MODELS)
            with ThreadPoolExecutor(len(tasks)) as pool:
                made = pool.map(lambda one: self._started(name, one), tasks)
                self._engines |= {(name, one): engine for one, engine in zip(tasks, made, strict=True)}
        return self._engines[name, task]

    def _started(self, name: str, task: Task) -> Engine:
        folder = self._folder / f"{name}-{task}".replace(" ", "-")
        self._kinds.append(kind := KINDS[name](self._models, folder, pytest.MonkeyPatch(), self))
        return kind.started(task)

    def close(self) -> None:
        """Stop them."""
        for kind in self._kinds:
            kind.close()
