"""An engine without a model: an answer is a hash of the question, and it takes the time that the caller asks for.

With it traces are replayed and clients are tested without torch, under the life cycle and the memory accounting of real models.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from itertools import count

from workers.gpu.call_control import CallControl
from workers.gpu.devices import Device
from workers.gpu.engines import canary
from workers.gpu.engines.abstract import Engine, Task
from workers.gpu.engines.canary import Answer, Answers
from workers.gpu.items import Prompt, Sampling, ScoreItem, TokenLogprobs

_WORDS = ("alpha", "bravo", "carol", "delta", "echo", "foxtrot", "golf", "hotel")
_IDS = 1 << 16


class StubEngine(Engine):
    """Deterministic answers; holds the memory it declares, by declaration only."""

    pretends = True

    def __init__(self, name: str, task: Task, memory_mb: float, max_concurrency: int = 1) -> None:
        """Make an absent stub that says it holds `memory_mb` MiB on each device."""
        super().__init__(name, task, max_concurrency)
        self._declared_mb = memory_mb
        self._held_mb, self._replicas = 0.0, 1
        self._count = threading.Lock()
        self._calls = 0

    @property
    def calls(self) -> int:
        """How many calls were let in so far."""
        return self._calls

    def held_mb(self) -> Sequence[float]:
        """Return the declared MiB for each of the devices it is on."""
        return [self._held_mb / self._replicas] * self._replicas

    def _start(self, devices: Sequence[Device]) -> None:
        self._hold(devices)

    def _hold(self, devices: Sequence[Device]) -> None:
        self._held_mb, self._replicas = self._declared_mb * len(devices), len(devices)

    def _evict(self) -> None:
        self._held_mb = 0.0

    def _restore(self, devices: Sequence[Device]) -> None:
        self._hold(devices)

    def _free(self) -> None:
        self._held_mb = 0.0

    def _canary(self) -> list[Answers]:
        return [tuple(Answer(tuple(_chain(ids))) for ids in canary.questions(1 << 16, None))]

    def _score(self, items: list[ScoreItem], control: CallControl) -> list[float]:
        self._take_time(control)
        return [_fraction(item.model_dump_json()) * 2.0 - 1.0 for item in items]

    def _logprobs(self, sequences: list[list[int]], top_k: int | None, control: CallControl) -> list[TokenLogprobs]:
        self._take_time(control)
        return [_ranked(sequence, top_k) for sequence in sequences]

    def _generate(self, prompts: list[Prompt], sampling: Sampling, control: CallControl) -> list[str]:
        self._take_time(control)
        seed = sampling.seed if sampling.temperature else 0
        return [_babble(f"{seed}:{prompt}", min(sampling.max_tokens, 64)) for prompt in prompts]

    def _take_time(self, control: CallControl) -> None:
        with self._count:
            self._calls += 1
        control.cancelled.wait(control.work_s)
        control.check()


def _fraction(text: str) -> float:
    """Map a text to a number in 0..1 (1 excluded), always the same."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:4], "big") / (1 << 32)


def _chain(sequence: list[int]) -> list[float]:
    """Give each id after the first a log-prob that depends on all ids up to it."""
    digest, out = hashlib.sha256(), []
    for index, token in enumerate(sequence):
        digest.update(b"%d," % token)
        if index:
            out.append(-10.0 * int.from_bytes(digest.digest()[:4], "big") / (1 << 32))
    return out


def _ranked(sequence: list[int], top_k: int | None) -> TokenLogprobs:
    """Give log-probs, and ranks and most likely ids that fit them: rank r has the log-probs above -r / 2, up to -(r - 1) / 2."""
    values = _chain(sequence)
    if top_k is None:
        return TokenLogprobs(values)
    ranks = [1 + int(-2.0 * value) for value in values]
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    for token, value, rank in zip(sequence[1:], values, ranks, strict=True):
        others = (other for other in count(round(-1e6 * value) % _IDS) if other != token)
        top_ids += [token if place == rank else next(others) for place in range(1, top_k + 1)]
        top_logprobs += [value if place == rank else 0.25 - place / 2.0 for place in range(1, top_k + 1)]
    return TokenLogprobs(values, ranks, top_ids, top_logprobs)


def _babble(text: str, words: int) -> str:
    return " ".join(_WORDS[int(_fraction(f"{text}:{index}") * len(_WORDS))] for index in range(words))
