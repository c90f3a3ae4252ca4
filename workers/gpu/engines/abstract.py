"""The interface of an engine: the methods of every kind of engine, and the checks that they share.

A kind of engine implements the methods with an underscore. They are called only in the right state and with checked input. Those that
take weights away are called only when no call is running. Nothing here imports torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import clear_frames
from typing import Literal

from scheduler.model.lifecycle import ServiceState
from tangram.errors import TangramError
from workers.gpu.control import Control
from workers.gpu.devices import Device
from workers.gpu.engines.lifecycle import Lifecycle
from workers.gpu.errors import CallFailed, NotSupported, OverBudget, one_line
from workers.gpu.items import Sampling, ScoreItem, read_items, read_prompts, read_sampling, read_sequences

Task = Literal["score", "logprobs"]

_DRAIN_S = 10.0
"""Seconds within which the calls of an engine that died must end before it is started again."""


class Engine(ABC):
    """One service's model and where its weights are. Safe for many threads."""

    pretends = False
    """Whether it waits for `work_s` instead of computing."""

    def __init__(self, name: str, task: Task, max_concurrency: int) -> None:
        """Make an absent engine for the service `name`, that lets `max_concurrency` calls in at a time."""
        self.name = name
        self.task = task
        self._limit = max_concurrency
        self._life = Lifecycle(name)
        self._copy_mb = math.inf
        self._most_mb = math.inf

    @property
    def state(self) -> ServiceState:
        """Where the engine is in its life cycle."""
        return self._life.state

    @property
    def failure(self) -> str:
        """Why it is `failed`; otherwise empty."""
        return self._life.failure

    @property
    def running(self) -> int:
        """How many calls it is working on."""
        return self._life.running

    def start(self, devices: Sequence[Device], most_mb: float = math.inf) -> None:
        """Load the model onto the devices, from absent or failed; it may hold `most_mb` MiB on each.

        Raises `EngineFailed` with the reason (then the engine is `failed` and holds nothing), `WrongState` otherwise.
        """
        with self._life.changing("starting", "resident", _DRAIN_S), self._clean_on_error():
            self._most_mb = most_mb
            self._start(devices)
            each = self.memory_mb() / len(devices)
            if each > most_mb:
                raise OverBudget(f"it holds {each:.1f} MiB on a device and may hold {most_mb:g}")

    def evict(self, drain_s: float = 60.0) -> None:
        """Move the weights from the devices to host memory, once the running calls have ended.

        Raises `EngineBusy` if they do not within `drain_s` seconds, `EngineFailed` if moving failed.
        """
        with self._life.changing("evicting", "host", drain_s), self._clean_on_error():
            self._evict()

    def restore(self, devices: Sequence[Device]) -> None:
        """Bring the weights back from host memory, to these or other devices. Raises as `start` does."""
        with self._life.changing("restoring", "resident"), self._clean_on_error():
            self._restore(devices)

    def stop(self, drain_s: float = 60.0) -> None:
        """Give back everything, on the devices and in host memory, and be absent. Raises `EngineBusy`."""
        with self._life.stopping(drain_s):
            self._free()

    def score(self, items: Sequence[object], control: Control | None = None) -> list[float]:
        """Score responses; items are `{"prompt", "response"}`, the scores raw logits, one per item.

        Raises `BadInput`, `NotSupported`, `NotResident`, `CallCancelled` or `CallFailed`.
        """
        self._must_be("score", "score")
        read = read_items(items)
        with self._working(control) as control:
            return self._score(read, control)

    def logprobs(self, sequences: Sequence[object] | Mapping[str, object], control: Control | None = None) -> list[list[float]]:
        """Return, for each sequence of n token ids, the n-1 log-probs (natural) of ids 1..n-1 given those before.

        Sequences are lists of ids, or all of them packed (`tangram.arrays.PackedInts`). Raises as `score` does.
        """
        self._must_be("logprobs", "give log-probs")
        read = read_sequences(sequences)
        with self._working(control) as control:
            return self._logprobs(read, control)

    def generate(
        self, prompts: Sequence[object], max_tokens: int = 64, temperature: float = 0.0, seed: int = 0, control: Control | None = None
    ) -> list[str]:
        """Continue prompts of plain text; temperature 0 is greedy. Raises as `score` does."""
        self._must_be("logprobs", "generate")
        read, sampling = read_prompts(prompts), read_sampling(max_tokens, temperature, seed)
        with self._working(control) as control:
            return self._generate(read, sampling, control)

    def copies_at_start(self, devices: Sequence[Device]) -> bool:
        """Say whether a start on these devices makes the copy in host memory at once, and keeps it while it is resident."""
        return False

    def may_copy(self, most_mb: float) -> None:
        """Limit the copy that the next start makes to `most_mb` MiB; without a copy at the start, the first eviction makes it."""
        self._copy_mb = most_mb

    def can_restore(self, devices: Sequence[Device]) -> bool:
        """Say whether the copy in host memory can be restored to these devices; otherwise the engine is started there."""
        return True

    @abstractmethod
    def memory_mb(self) -> float:
        """Return the MiB of device memory that its weights hold now, over all its devices, as measured."""

    def host_mb(self) -> float:
        """Return the MiB of host memory that its restorable copy holds now, as measured."""
        return 0.0

    def residual_mb(self) -> float:
        """Return the MiB that it keeps of each device while its copy is in host memory; while resident, the most that it may keep."""
        return 0.0

    @abstractmethod
    def _start(self, devices: Sequence[Device]) -> None: ...

    @abstractmethod
    def _evict(self) -> None: ...

    @abstractmethod
    def _restore(self, devices: Sequence[Device]) -> None: ...

    @abstractmethod
    def _free(self) -> None:
        """Release everything; works in any state and any number of times."""

    @abstractmethod
    def _score(self, items: list[ScoreItem], control: Control) -> list[float]: ...

    @abstractmethod
    def _logprobs(self, sequences: list[list[int]], control: Control) -> list[list[float]]: ...

    @abstractmethod
    def _generate(self, prompts: list[str], sampling: Sampling, control: Control) -> list[str]: ...

    def _must_be(self, task: Task, doing: str) -> None:
        if self.task != task:
            raise NotSupported(f"{self.name} is a service of task {self.task!r}: it does not {doing}")

    @contextmanager
    def _working(self, control: Control | None) -> Iterator[Control]:
        """Let a call in; an error inside becomes one line, and the engine stays resident."""
        control = control or Control()
        if control.work_s and not self.pretends:
            raise NotSupported(f"{self.name} computes with a model: it takes no work_s")
        with self._life.working(self._limit, control):
            try:
                yield control
            except TangramError:
                raise
            except Exception as error:
                clear_frames(error.__traceback__)
                raise CallFailed(f"{self.name}: {one_line(error)}") from error

    @contextmanager
    def _clean_on_error(self) -> Iterator[None]:
        """Hold nothing after a failed change, so that a failed engine costs no memory."""
        try:
            yield
        except BaseException as error:
            # A traceback keeps the locals of its frames, among them weights, as long as the error is kept.
            clear_frames(error.__traceback__)
            self._free()
            raise
