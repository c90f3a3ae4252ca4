"""The interface of an engine: the methods of every kind of engine, and the checks that they share.

A kind of engine implements the methods with an underscore. They are called only in the right state and with checked input. Those that
take weights away are called only when no call is running. Nothing here imports torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from scheduler.model.lifecycle import ServiceState
from tangram.errors import TangramError
from workers.gpu.call_control import CallControl
from workers.gpu.devices import Device
from workers.gpu.engines import canary
from workers.gpu.engines.canary import Answers
from workers.gpu.engines.lifecycle import Lifecycle
from workers.gpu.errors import CallFailed, NotSupported, OverBudget, WrongAnswer, forget_locals, one_line
from workers.gpu.items import (
    Prompt,
    Sampling,
    ScoreItem,
    TokenLogprobs,
    read_items,
    read_prompts,
    read_sampling,
    read_sequences,
    read_top_k,
)

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
        self._answered: tuple[Answers, str] = ((), "")
        self._doubted = False
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
        """Load the model onto the devices, from absent or failed; it may hold `most_mb` MiB of each.

        It answers the fixed questions of `canary.py` then, and the answers are kept for the restores. After a wrong answer they must be
        those of the start before: what spoilt a restore may spoil a start as well.

        Raises `EngineFailed` with the reason (then the engine is `failed` and holds nothing), `WrongState` otherwise.
        """
        with self._life.changing("starting", "resident", _DRAIN_S), self._clean_on_error():
            self._most_mb = most_mb
            self._start(devices)
            answers = self._canary()
            canary.must_be_finite(answers[0])
            if not self._doubted:
                self._answered = answers[0], devices[0].model
            self._must_agree(answers, devices)
            self._doubted = False
            each = max(self.held_mb(), default=0.0)
            if each > most_mb:
                raise OverBudget(f"it holds {each:.1f} MiB on a device and may hold {most_mb:g}")

    def evict(self, drain_s: float = 60.0, copy: bool = True) -> None:
        """Move the weights from the devices to host memory, once the running calls have ended.

        Without `copy` the weights are dropped, and a restore reads them from the folder; where `leaves_without_copy` says so.

        Raises `EngineBusy` if they do not within `drain_s` seconds, `EngineFailed` if moving failed.
        """
        with self._life.changing("evicting", "host", drain_s), self._clean_on_error():
            if copy:
                self._evict()
            else:
                self._evict_without_copy()

    def restore(self, devices: Sequence[Device]) -> None:
        """Bring the weights back from host memory, to these or other devices.

        Raises as `start` does, and `WrongAnswer` if the fixed questions are not answered as at the start.
        """
        with self._life.changing("restoring", "resident"), self._clean_on_error():
            self._restore(devices)
            try:
                self._must_agree(self._canary(), devices)
            except CallFailed as error:
                self._doubted = True
                raise WrongAnswer(f"fixed questions are no longer answered: {one_line(error)}") from error
            except WrongAnswer:
                self._doubted = True
                raise

    def stop(self, drain_s: float = 60.0) -> None:
        """Give back everything, on the devices and in host memory, and be absent. Raises `EngineBusy`."""
        with self._life.stopping(drain_s):
            self._free()

    def score(self, items: Sequence[object], control: CallControl | None = None) -> list[float]:
        """Score responses; items are `{"prompt", "response"}`, the scores raw logits, one per item.

        Raises `BadInput`, `NotSupported`, `NotResident`, `CallCancelled` or `CallFailed`.
        """
        self._must_be("score", "score")
        read = read_items(items)
        with self._working(control) as control:
            return self._score(read, control)

    def logprobs(self, sequences: Sequence[object] | Mapping[str, object], control: CallControl | None = None) -> list[list[float]]:
        """Return, for each sequence of n token ids, the n-1 log-probs (natural) of ids 1..n-1 given those before.

        Sequences are lists of ids, or all of them packed (`tangram.arrays.PackedInts`). Raises as `score` does.
        """
        self._must_be("logprobs", "give log-probs")
        read = read_sequences(sequences)
        with self._working(control) as control:
            return [one.logprobs for one in self._logprobs(read, None, control)]

    def ranked(
        self, sequences: Sequence[object] | Mapping[str, object], top_k: int, control: CallControl | None = None
    ) -> list[TokenLogprobs]:
        """Return log-probs as `logprobs` does, with the ranks of the ids and the `top_k` most likely ids of each position.

        A vocabulary of fewer ids is given whole. Raises as `score` does.
        """
        self._must_be("logprobs", "give log-probs")
        read, checked = read_sequences(sequences), read_top_k(top_k)
        with self._working(control) as control:
            return self._logprobs(read, checked, control)

    def generate(
        self, prompts: Sequence[object], max_tokens: int = 64, temperature: float = 0.0, seed: int = 0, control: CallControl | None = None
    ) -> list[str]:
        """Continue prompts of plain text, or conversations; temperature 0 is greedy. Raises as `score` does."""
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

    def leaves_without_copy(self) -> bool:
        """Say whether, resident, it could leave its devices without a copy in host memory and be restored all the same."""
        return False

    @abstractmethod
    def held_mb(self) -> Sequence[float]:
        """Return the MiB that it holds of each of its devices now, in their order, as measured.

        While it is in host memory that is what it keeps of them, such as the context of a sleeping server.
        """

    def memory_mb(self) -> float:
        """Return the MiB that it holds now, over all its devices, as measured."""
        return sum(self.held_mb())

    @property
    def measured_exactly(self) -> bool:
        """Whether what it holds is known of itself; otherwise from the change of its devices, which other programs blur."""
        return True

    @property
    def assumed(self) -> bool:
        """Whether nothing is known of what it holds since its last change: others freed more of each of its devices meanwhile."""
        return False

    def host_mb(self) -> float:
        """Return the MiB of host memory that its restorable copy holds now, as measured."""
        return 0.0

    def give_back(self) -> None:
        """Return device memory that is only kept for reuse; may be called at any time."""
        return

    @abstractmethod
    def _start(self, devices: Sequence[Device]) -> None: ...

    @abstractmethod
    def _canary(self) -> list[Answers]:
        """Ask the fixed questions of each copy of the model, in the order of its devices, though it is not resident yet.

        The last step of every start and restore. Raises `CallFailed` where a model that works gives no numbers.
        """

    def _tolerance(self, before: Answers, *, same_model: bool) -> float:
        """Return how much later answers may differ from those `before`; `same_model` says whether of the same model of device."""
        return 0.0

    @abstractmethod
    def _evict(self) -> None: ...

    def _evict_without_copy(self) -> None:
        raise NotSupported(f"{self.name} cannot leave its devices without a copy in host memory")

    @abstractmethod
    def _restore(self, devices: Sequence[Device]) -> None: ...

    @abstractmethod
    def _free(self) -> None:
        """Release everything; works in any state and any number of times."""

    @abstractmethod
    def _score(self, items: list[ScoreItem], control: CallControl) -> list[float]: ...

    @abstractmethod
    def _logprobs(self, sequences: list[list[int]], top_k: int | None, control: CallControl) -> list[TokenLogprobs]: ...

    @abstractmethod
    def _generate(self, prompts: list[Prompt], sampling: Sampling, control: CallControl) -> list[str]: ...

    def _must_agree(self, answers: Sequence[Answers], devices: Sequence[Device]) -> None:
        """Raise `WrongAnswer` unless every copy of the model answers as it did at the start."""
        before, model = self._answered
        for found, device in zip(answers, devices, strict=False):
            canary.must_agree(before, found, self._tolerance(before, same_model=device.model == model))

    def _must_be(self, task: Task, doing: str) -> None:
        if self.task != task:
            raise NotSupported(f"{self.name} is a service of task {self.task!r}: it does not {doing}")

    @contextmanager
    def _working(self, control: CallControl | None) -> Iterator[CallControl]:
        """Let a call in; an error inside becomes one line, and the engine stays resident."""
        control = control or CallControl()
        if control.work_s and not self.pretends:
            raise NotSupported(f"{self.name} computes with a model: it takes no work_s")
        with self._life.working(self._limit, control):
            try:
                yield control
            except TangramError:
                raise
            except Exception as error:
                forget_locals(error)
                raise CallFailed(f"{self.name}: {one_line(error)}") from error

    @contextmanager
    def _clean_on_error(self) -> Iterator[None]:
        """Hold nothing after a failed change, so that a failed engine costs no memory."""
        try:
            yield
        except BaseException as error:
            forget_locals(error)
            self._free()
            raise
