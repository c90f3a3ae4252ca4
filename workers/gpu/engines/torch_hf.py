"""The engine that computes with a Hugging Face model through transformers and torch.

A service on several cells has a replica on each and splits a batch over them. Calls that wait are computed together
(`merging`), but for generation, which goes prompt by prompt: a service with many callers at once wants the vLLM engine.

Which memory it holds is measured, not remembered: a block counts until torch has really freed its storage. On a CUDA device the largest
batch is computed at the start, and what it takes at most is held beside the weights for as long as they are there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from app.services_file import ConfigError, DeclaredDtype
from tangram.wire import MOST_TOP_K
from workers.gpu.call_control import CallControl
from workers.gpu.devices import Device
from workers.gpu.engines import canary, compute
from workers.gpu.engines.abstract import Engine, Task
from workers.gpu.engines.canary import Answer, Answers
from workers.gpu.engines.compute import Batch, share_out
from workers.gpu.engines.host_copy import FileCopy, HostCopy, PinnedCopy
from workers.gpu.engines.loading import load
from workers.gpu.engines.merging import Merger
from workers.gpu.engines.texts import Texts, Wording, check_ids
from workers.gpu.engines.weights import Layout, StorageProbe, empty, give_back
from workers.gpu.errors import CallFailed, DeviceError, one_line
from workers.gpu.items import Prompt, Reading, Sampling, ScoreItem, TokenLogprobs
from workers.memory import MIB

S = TypeVar("S")
T = TypeVar("T")

_BATCH_TOKENS = 16_384
_BATCH_LOGITS = 1 << 28
_LOOK_FOR_CANCEL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Model:
    """What stays in the process from the first load on: everything but the weights."""

    skeletons: list[PreTrainedModel]
    layout: Layout
    texts: Texts
    longest: int | None
    vocabulary: int
    ends: frozenset[int]


@dataclass(slots=True)
class _Replica:
    """The model on one device."""

    model: PreTrainedModel
    block: torch.Tensor
    one_prompt: Lock = field(default_factory=Lock)

    @contextmanager
    def generating(self, control: CallControl) -> Iterator[PreTrainedModel]:
        """Wait for the model to continue a prompt with: one at a time, since each has a cache as long as its text.

        Raises `CallCancelled`.
        """
        while not self.one_prompt.acquire(timeout=_LOOK_FOR_CANCEL_S):
            control.check()
        try:
            control.check()
            yield self.model
        finally:
            self.one_prompt.release()


class TorchEngine(Engine):
    """A reward model or a teacher from a local model folder."""

    def __init__(
        self,
        name: str,
        task: Task,
        folder: Path,
        state_dir: Path,
        *,
        max_concurrency: int = 1,
        dtype: DeclaredDtype = "auto",
        wording: Wording | None = None,
    ) -> None:
        """Make an absent engine for a model folder.

        `state_dir` is the folder for host copies of models on CPU devices, `dtype` what weights are held and computed
        in (`auto`: what the checkpoint says), `wording` how inputs are put together.
        """
        super().__init__(name, task, max_concurrency)
        self._folder, self._state_dir, self._dtype, self._wording = folder, state_dir, dtype, wording or Wording()
        self._model: _Model | None = None
        self._replicas: list[_Replica] = []
        self._host: HostCopy | None = None
        self._kind = "cpu"
        self._closed: list[HostCopy] = []
        self._blocks: list[StorageProbe] = []
        self._activations_mb = 0.0
        self._scores = Merger(self._score_together, len, lambda: _BATCH_TOKENS * len(self._replicas))
        self._sequences = Merger(
            self._read_together, lambda reading: len(reading.ids), lambda: self._logprob_tokens() * len(self._replicas)
        )

    def held_mb(self) -> Sequence[float]:
        """Return the MiB of each weight block that torch has not freed, and of the activations of the largest batch beside it."""
        blocks = [watch.held_bytes() for watch in self._blocks]
        return [held / MIB + self._activations_mb for held in blocks if held]

    def host_mb(self) -> float:
        """Return the MiB that host copies hold, also one that was closed while something still referred to it."""
        self._closed = [copy for copy in self._closed if copy.held_bytes()]
        copies = self._closed if self._host is None else [*self._closed, self._host]
        return sum(copy.held_bytes() for copy in copies) / MIB

    def give_back(self) -> None:
        """Return what torch keeps of all devices for its next tensors."""
        torch.cuda.empty_cache()

    def copies_at_start(self, devices: Sequence[Device]) -> bool:
        """Say yes beside CUDA devices: the weights go there through pinned memory."""
        return devices[0].kind == "cuda"

    def _start(self, devices: Sequence[Device]) -> None:
        self._kind = devices[0].kind
        block = torch.empty(0)

        def block_for(layout: Layout) -> torch.Tensor:
            nonlocal block
            self._must_fit(layout.size_bytes / MIB, devices)
            self._drop_copy()
            copied = self.copies_at_start(devices) and layout.size_bytes / MIB <= self._copy_mb
            self._host = PinnedCopy(layout.size_bytes) if copied else None
            block = torch.zeros(layout.size_bytes, dtype=torch.uint8) if self._host is None else self._host.block
            return block

        loaded = load(self._folder, self.task, self._dtype, block_for)
        texts = Texts(loaded.tokenizer, self._wording)
        skeletons = [loaded.model, *(copy.deepcopy(loaded.model) for _ in devices[1:])]
        self._model = _Model(skeletons, loaded.layout, texts, loaded.longest, loaded.vocabulary, loaded.ends)
        if self._host is not None:
            blocks = self._loaded(self._model, self._host, devices)
        elif devices[0].kind == "cuda":
            blocks = [block.to(device.torch_device, copy=True) for device in devices]
        else:
            blocks = [block, *(block.clone() for _ in devices[1:])]
        self._put(self._model, blocks)
        self._activations_mb = self._largest_batch_mb(devices)

    def _evict(self) -> None:
        if self._host is None:
            self._host = self._copied(self._replicas[0].block)
        self._let_go()

    def _restore(self, devices: Sequence[Device]) -> None:
        model, host = self._model, self._host
        if model is None or host is None:
            raise RuntimeError("there is no host copy to restore from")
        model.skeletons.extend(copy.deepcopy(model.skeletons[0]) for _ in devices[len(model.skeletons) :])
        self._put(model, self._loaded(model, host, devices))

    def _free(self) -> None:
        self._let_go()
        self._activations_mb = 0.0
        self._model = None
        self._drop_copy()

    def _drop_copy(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            self._closed.append(host)
            host.close()

    def _must_fit(self, size_mb: float, devices: Sequence[Device]) -> None:
        """Refuse a model before its weights are read, where they alone are more than a device, or the service, may take."""
        least = min(devices, key=lambda device: device.memory_mb)
        split = 'engine = "vllm", which splits them over several cells'
        if size_mb > least.memory_mb:
            raise ConfigError(f"its weights take {size_mb:.1f} MiB and {least.name} has {least.memory_mb}: they need {split}")
        if size_mb > self._most_mb:
            room = f"there is room for {self._most_mb:.1f}"
            raise ConfigError(f"its weights alone take {size_mb:.1f} MiB of each cell, and {room}: declare more memory_mb, or {split}")

    def _largest_batch_mb(self, devices: Sequence[Device]) -> float:
        """Compute the largest batch on each CUDA device and return the most MiB that it took of one besides the weights."""
        if devices[0].kind != "cuda":
            return 0.0
        most_tokens = _BATCH_TOKENS if self.task == "score" else self._logprob_tokens()
        length = min(self._here().longest or most_tokens, most_tokens)
        batch = [[0] * length] * (most_tokens // length)

        def work(model: PreTrainedModel) -> object:
            if self.task == "score":
                return compute.scores(model, batch)
            return compute.logprobs(model, [Reading(ids, MOST_TOP_K) for ids in batch])

        try:
            return max(_peak_mb(device, partial(work, replica.model)) for device, replica in zip(devices, self._replicas, strict=True))
        except torch.OutOfMemoryError as error:
            where = ", ".join(device.name for device in devices)
            raise RuntimeError(f"there is no room beside the weights on {where} for a batch of {length * len(batch)} tokens") from error

    def _copied(self, block: torch.Tensor) -> HostCopy:
        """Copy a device block to where it waits."""
        if self._kind == "cpu":
            return FileCopy(block, self._state_dir)
        pinned = PinnedCopy(block.numel())
        try:
            pinned.block.copy_(block)
        except BaseException:
            pinned.close()
            raise
        return pinned

    def _loaded(self, model: _Model, host: HostCopy, devices: Sequence[Device]) -> list[torch.Tensor]:
        """Return a block on each device that holds the weights, copied to all at the same time."""
        blocks = [torch.empty(model.layout.size_bytes, dtype=torch.uint8, device=device.torch_device) for device in devices]
        host.load(blocks)
        return blocks

    def _put(self, model: _Model, blocks: Sequence[torch.Tensor]) -> None:
        """Add replicas whose weights are the blocks."""
        for skeleton, block in zip(model.skeletons, blocks, strict=False):
            model.layout.fill(skeleton, block)
            self._replicas.append(_Replica(skeleton, block))
            self._blocks.append(StorageProbe(block))

    def _let_go(self) -> None:
        while self._replicas:
            empty(self._replicas.pop().model)
        self._blocks = [watch for watch in self._blocks if watch.held_bytes()]
        give_back()

    def _canary(self) -> list[Answers]:
        """Ask each replica all questions in one batch, past the merger: a batch shared with other inputs would change the last bits."""
        model = self._here()
        asked = canary.questions(model.vocabulary, model.longest)

        def answered(torch_model: PreTrainedModel) -> Answers:
            if self.task == "score":
                return tuple(Answer((value,)) for value in compute.scores(torch_model, asked))
            return tuple(Answer(tuple(said.logprobs)) for said in compute.logprobs(torch_model, list(map(Reading, asked))))

        return [answered(replica.model) for replica in self._replicas]

    def _tolerance(self, before: Answers, *, same_model: bool) -> float:
        dtype = str(self._here().skeletons[0].dtype).removeprefix("torch.")
        return 0.0 if same_model else canary.tolerance(dtype, before)

    def _score(self, items: list[ScoreItem], control: CallControl) -> list[float]:
        model = self._here()
        ids = model.texts.score_ids(items)
        self._check(ids, "items", model)
        out = self._scores.ask(ids, control)
        for index, value in enumerate(out):
            if not math.isfinite(value):
                raise CallFailed(f"items[{index}]: the model's score is {value}")
        return out

    def _logprobs(self, sequences: list[list[int]], top_k: int | None, control: CallControl) -> list[TokenLogprobs]:
        model = self._here()
        self._check(sequences, "sequences", model)
        out = self._sequences.ask([Reading(ids, top_k) for ids in sequences], control)
        for index, said in enumerate(out):
            if any(math.isnan(value) for value in said.logprobs):
                raise CallFailed(f"sequences[{index}]: the model's log-probs are not numbers")
        return out

    def _generate(self, prompts: list[Prompt], sampling: Sampling, control: CallControl) -> list[str]:
        model = self._here()
        ids = model.texts.prompt_ids(prompts)
        self._check(ids, "prompts", model, sampling.max_tokens)

        def one(replica: _Replica, batch: Sequence[tuple[int, list[int]]]) -> list[str]:
            made = []
            for index, prompt in batch:
                with replica.generating(control) as torch_model:
                    try:
                        made.append(compute.generate(torch_model, prompt, sampling, sampling.seed + index, model.ends, control))
                    except FloatingPointError as error:
                        raise CallFailed(f"prompts[{index}]: {error}") from error
            return [model.texts.text(tokens) for tokens in made]

        return self._run(list(enumerate(ids)), share_out([len(prompt) for prompt in ids], 0, len(self._replicas)), one, control)

    def _here(self) -> _Model:
        if self._model is None:
            raise RuntimeError("the engine is resident without a model")
        return self._model

    def _check(self, batch: Sequence[Sequence[int]], what: str, model: _Model, more: int = 0) -> None:
        check_ids(batch, what, vocabulary=model.vocabulary, longest=model.longest, more=more)

    def _score_together(self, inputs: list[list[int]]) -> list[float]:
        """Score one round of token ids, in padded batches."""
        shares = share_out([len(ids) for ids in inputs], _BATCH_TOKENS, len(self._replicas))
        return self._run(inputs, shares, lambda replica, batch: compute.scores(replica.model, batch), CallControl())

    def _read_together(self, inputs: list[Reading]) -> list[TokenLogprobs]:
        """Give the log-probs of one round of token ids, in padded batches."""
        shares = share_out([len(reading.ids) for reading in inputs], self._logprob_tokens(), len(self._replicas))
        return self._run(inputs, shares, lambda replica, batch: compute.logprobs(replica.model, batch), CallControl())

    def _logprob_tokens(self) -> int:
        """Return the most tokens of a batch whose logits, one per token and id of the vocabulary, are not too many."""
        return min(_BATCH_TOKENS, max(1, _BATCH_LOGITS // self._here().vocabulary))

    def _run(
        self,
        inputs: Sequence[S],
        shares: list[list[Batch]],
        work: Callable[[_Replica, Sequence[S]], list[T]],
        control: CallControl,
    ) -> list[T]:
        """Work through each replica's batches of indices; answers come back in the order of the inputs."""
        answers: dict[int, T] = {}

        def share(rank: int) -> None:
            for batch in shares[rank]:
                control.check()
                answers.update(zip(batch, work(self._replicas[rank], [inputs[index] for index in batch]), strict=True))

        if len(self._replicas) == 1:
            share(0)
        else:
            with ThreadPoolExecutor(len(self._replicas)) as pool:
                list(pool.map(share, range(len(self._replicas))))
        return [answers[index] for index in range(len(inputs))]


def open_contexts(devices: Sequence[Device]) -> None:
    """Take what the process of the worker needs of each CUDA device, once for all services: its context and the libraries of torch.

    Raises `DeviceError` where a device cannot be used: it has no memory left, or belongs to another process alone.
    """
    for device in devices:
        try:
            ones = torch.ones(16, 16, device=device.torch_device)
            torch.mm(ones, ones).sum().item()
        except RuntimeError as error:
            raise DeviceError(f"{device.name} cannot be used: {one_line(error)}") from error
    torch.cuda.empty_cache()


def _peak_mb(device: Device, work: Callable[[], object]) -> float:
    """Return the most MiB that a batch takes of a CUDA device; the smaller of two runs, since other services may compute meanwhile."""
    peaks = []
    for _ in range(2):
        before = torch.cuda.memory_allocated(device.torch_device)
        torch.cuda.reset_peak_memory_stats(device.torch_device)
        work()
        peaks.append(torch.cuda.max_memory_allocated(device.torch_device) - before)
    torch.cuda.empty_cache()
    return max(0, min(peaks)) / MIB
