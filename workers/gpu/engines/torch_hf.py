"""The engine that computes with a Hugging Face model through transformers and torch.

A service on several cells has a replica on each and splits a batch over them. Which memory it holds is measured,
not remembered: a block counts until torch has really freed its storage.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from workers.gpu.control import Control
from workers.gpu.devices import MIB, Device
from workers.gpu.engines import compute
from workers.gpu.engines.abstract import Engine, Task
from workers.gpu.engines.batching import Batch, share_out
from workers.gpu.engines.host_copy import HostCopy, keep
from workers.gpu.engines.loading import Dtype, load
from workers.gpu.engines.process_memory import give_back
from workers.gpu.engines.texts import Texts
from workers.gpu.engines.weights import Layout, Watch, empty
from workers.gpu.errors import BadInput, CallFailed
from workers.gpu.items import Sampling, ScoreItem

S = TypeVar("S")
T = TypeVar("T")

_BATCH_TOKENS = 16_384
_BATCH_LOGITS = 1 << 28


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
        dtype: Dtype = "float32",
        separator: str = "\n",
    ) -> None:
        """Make an absent engine for a model folder.

        `state_dir` is the folder for host copies of models on CPU devices, `dtype` what weights are held and computed
        in, `separator` what stands between prompt and response of plain text.
        """
        super().__init__(name, task, max_concurrency)
        self._folder, self._state_dir, self._dtype, self._separator = folder, state_dir, dtype, separator
        self._model: _Model | None = None
        self._replicas: list[_Replica] = []
        self._host: HostCopy | None = None
        self._blocks: list[Watch] = []

    def memory_mb(self) -> float:
        """Return the MiB of the weight blocks that torch has not freed."""
        return sum(watch.held_bytes() for watch in self._blocks) / MIB

    def _start(self, devices: Sequence[Device]) -> None:
        loaded = load(self._folder, self.task, self._dtype)
        model = loaded.model
        layout = Layout.of(model)
        vocabulary = loaded.vocabulary
        block = layout.take(model)
        texts = Texts(loaded.tokenizer, self._separator)
        skeletons = [model, *(copy.deepcopy(model) for _ in devices[1:])]
        self._model = _Model(skeletons, layout, texts, loaded.longest, vocabulary, _end_ids(model, texts))
        for index, device in enumerate(devices):
            mine = block if index == 0 and device.kind == "cpu" else block.to(device.torch_device, copy=True)
            self._put(self._model, mine)

    def _evict(self) -> None:
        if self._host is None:
            self._host = keep(self._replicas[0].block, self._state_dir)
        self._let_go()

    def _restore(self, devices: Sequence[Device]) -> None:
        model, host = self._model, self._host
        if model is None or host is None:
            raise RuntimeError("there is no host copy to restore from")
        model.skeletons.extend(copy.deepcopy(model.skeletons[0]) for _ in devices[len(model.skeletons) :])
        for device in devices:
            block = torch.empty(model.layout.size_bytes, dtype=torch.uint8, device=device.torch_device)
            host.load(block)
            self._put(model, block)

    def _free(self) -> None:
        self._let_go()
        if self._host is not None:
            self._host.close()
        self._host, self._model = None, None

    def _put(self, model: _Model, block: torch.Tensor) -> None:
        """Add a replica whose weights are the block."""
        skeleton = model.skeletons[len(self._replicas)]
        model.layout.fill(skeleton, block)
        self._replicas.append(_Replica(skeleton, block))
        self._blocks.append(Watch(block))

    def _let_go(self) -> None:
        while self._replicas:
            empty(self._replicas.pop().model)
        self._blocks = [watch for watch in self._blocks if watch.held_bytes()]
        give_back()

    def _score(self, items: list[ScoreItem], control: Control) -> list[float]:
        model = self._here()
        ids = model.texts.score_ids(items)
        self._check(ids, "items", model)
        out = self._spread(ids, _BATCH_TOKENS, compute.scores, control)
        for index, value in enumerate(out):
            if not math.isfinite(value):
                raise CallFailed(f"items[{index}]: the model's score is {value}")
        return out

    def _logprobs(self, sequences: list[list[int]], control: Control) -> list[list[float]]:
        model = self._here()
        self._check(sequences, "sequences", model)
        most = min(_BATCH_TOKENS, max(1, _BATCH_LOGITS // model.vocabulary))
        out = self._spread(sequences, most, compute.logprobs, control)
        for index, values in enumerate(out):
            if any(math.isnan(value) for value in values):
                raise CallFailed(f"sequences[{index}]: the model's log-probs are not numbers")
        return out

    def _generate(self, prompts: list[str], sampling: Sampling, control: Control) -> list[str]:
        model = self._here()
        ids = model.texts.prompt_ids(prompts)
        self._check(ids, "prompts", model, sampling.max_tokens)

        def one(replica: PreTrainedModel, batch: Sequence[tuple[int, list[int]]]) -> list[str]:
            made = (compute.generate(replica, prompt, sampling, sampling.seed + index, model.ends, control) for index, prompt in batch)
            return [model.texts.text(tokens) for tokens in made]

        return self._run(list(enumerate(ids)), share_out([len(prompt) for prompt in ids], 0, len(self._replicas)), one, control)

    def _here(self) -> _Model:
        if self._model is None:
            raise RuntimeError("the engine is resident without a model")
        return self._model

    def _check(self, batch: Sequence[Sequence[int]], what: str, model: _Model, more: int = 0) -> None:
        """Refuse inputs the model cannot read, naming the index; `more` tokens are to follow each."""
        for index, ids in enumerate(batch):
            if not ids:
                raise BadInput(f"{what}[{index}]: has no tokens")
            if model.longest is not None and len(ids) + more > model.longest:
                asked = f"{len(ids)} tokens" + (f" and {more} to come" if more else "")
                raise BadInput(f"{what}[{index}]: {asked}, the model reads at most {model.longest}")
            if (largest := max(ids)) >= model.vocabulary:
                raise BadInput(f"{what}[{index}]: token id {largest} is outside the vocabulary of {model.vocabulary}")

    def _spread(
        self,
        inputs: Sequence[list[int]],
        most_tokens: int,
        work: Callable[[PreTrainedModel, Sequence[list[int]]], list[T]],
        control: Control,
    ) -> list[T]:
        """Run token ids in padded batches."""
        return self._run(inputs, share_out([len(ids) for ids in inputs], most_tokens, len(self._replicas)), work, control)

    def _run(
        self,
        inputs: Sequence[S],
        shares: list[list[Batch]],
        work: Callable[[PreTrainedModel, Sequence[S]], list[T]],
        control: Control,
    ) -> list[T]:
        """Work through each replica's batches of indices; answers come back in the order of the inputs."""
        answers: dict[int, T] = {}

        def share(rank: int) -> None:
            for batch in shares[rank]:
                control.check()
                answers.update(zip(batch, work(self._replicas[rank].model, [inputs[index] for index in batch]), strict=True))

        if len(self._replicas) == 1:
            share(0)
        else:
            with ThreadPoolExecutor(len(self._replicas)) as pool:
                list(pool.map(share, range(len(self._replicas))))
        return [answers[index] for index in range(len(inputs))]


def _end_ids(model: PreTrainedModel, texts: Texts) -> frozenset[int]:
    """Return the ids that end a generated text, from the model's generation settings and the tokenizer."""
    settings = getattr(model, "generation_config", None)
    named = getattr(settings, "eos_token_id", None)
    several = named if isinstance(named, list) else [named]
    return frozenset(token for token in [*several, texts.end_id] if isinstance(token, int))
