"""From a model folder to a model and its tokenizer.

Only the local folder is read: never the network, never code that comes with a model, never pickled objects. A checkpoint that lacks
weights of its architecture is refused. Transformers would fill them with random numbers, and a reward model would score at random.

Weights are in host memory once:

1. The model is made on torch's `meta` device, which gives the layout of its block. Its maker can refuse it then.
2. Transformers loads the checkpoint, since it knows older names of weights and how to put some together. It is given tensors that are not
   read yet. One that it asks for is read from its file straight into its place in the block, and converted on the way.
3. What transformers made of several tensors, or renamed, lies elsewhere and is copied to its place. So do buffers that it computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from app.services_file import ConfigError, DeclaredDtype, Dtype, model_problem
from workers.gpu.engines.abstract import Task
from workers.gpu.engines.checkpoint import end_ids, resolve_dtype, weight_files
from workers.gpu.engines.safetensors_files import Stored, stored_tensors
from workers.gpu.engines.weights import Layout
from workers.gpu.errors import one_line

_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# transformers changes defaults of the whole process (dtype, initialisers) while it loads.
_one_load = threading.Lock()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in evaluation mode, whose weights are in the block that was made for them."""

    model: PreTrainedModel
    """The skeleton."""
    layout: Layout
    """The places of its tensors in the block."""
    tokenizer: PreTrainedTokenizerBase
    """The folder's tokenizer."""
    longest: int | None
    """Tokens of the longest input; none: no bound."""
    vocabulary: int
    """How many token ids there are."""
    ends: frozenset[int]
    """The ids that end a generated text."""


@dataclass(frozen=True, slots=True)
class _Folder:
    """What is known of a model folder before its weights are read."""

    path: Path
    task: Task
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    files: list[Path]
    skeleton: PreTrainedModel


def load(folder: Path, task: Task, dtype: DeclaredDtype, block_for: Callable[[Layout], torch.Tensor]) -> Loaded:
    """Load a model folder into the CPU block that `block_for` makes, in bytes, for the layout of the model.

    Before it is called nothing large has been read. It is called again, and its first block is not used, where the model turns out to
    hold some weights in another dtype than the rest.

    Raises `ConfigError` where the folder is no model folder, a file in it is broken, or it holds another kind of model; and what
    `block_for` raises.
    """
    found = _look_into(folder, task, dtype)
    layout = Layout.of(found.skeleton)
    block = block_for(layout)
    model = _filled(found, layout, block)
    if (other := Layout.of(model)) != layout:
        del model, block
        layout, block = other, block_for(other)
        model = _filled(found, layout, block)
    embeddings = model.get_input_embeddings().weight
    if not isinstance(embeddings, torch.Tensor):
        raise ConfigError(f"{folder} has no token embeddings")
    vocabulary = embeddings.shape[0]
    layout.take(model, block)
    model.requires_grad_(False)
    model.train(False)
    end_id = found.tokenizer.eos_token_id
    ends = end_ids(folder, found.config, end_id if isinstance(end_id, int) else None)
    return Loaded(model, layout, found.tokenizer, _longest(model, found.tokenizer), vocabulary, ends)


def _look_into(folder: Path, task: Task, dtype: DeclaredDtype) -> _Folder:
    """Read everything but the weights. Raises `ConfigError`."""
    if problem := model_problem(folder):
        raise ConfigError(problem)
    maker = AutoModelForSequenceClassification if task == "score" else AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        held = _DTYPES[resolve_dtype(folder, dtype)]
        files = weight_files(folder)
        with _one_load, torch.device("meta"):
            skeleton = maker.from_config(config, dtype=held, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{folder} cannot be loaded: {one_line(error)}") from error
    if not files:
        raise ConfigError(f"{folder} has pickled weights only, which are not read: convert them to safetensors")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f'{folder} is quantized, which the torch engine does not load: use engine = "vllm"')
    if task == "score" and config.num_labels != 1:
        raise ConfigError(f"{folder} has {config.num_labels} labels: a reward model has one")
    return _Folder(folder, task, config, tokenizer, held, files, skeleton)


def _filled(found: _Folder, layout: Layout, block: torch.Tensor) -> PreTrainedModel:
    """Return a model with the folder's weights, as many as possible of which lie in their places in the block. Raises `ConfigError`."""
    folder = found.path
    try:
        model, info = _read(found, layout.views(block))
    except Exception as error:
        raise ConfigError(f"{folder} cannot be loaded: {one_line(error)}") from error
    lacking = sorted(str(key) for part in ("missing_keys", "mismatched_keys") for key in info[part])
    modules = dict(model.named_modules())
    strange = sorted(str(key) for key in info["unexpected_keys"] if _is_superfluous(modules, str(key)))
    if lacking:
        raise ConfigError(
            f"{folder} has no fitting weights for {lacking[0]} ({len(lacking)} in all): it is no model for task {found.task!r}"
        )
    if strange:
        raise ConfigError(f"{folder} has weights of another architecture than its config.json names: {strange[0]} ({len(strange)} in all)")
    return model


def _read(found: _Folder, views: Mapping[str, torch.Tensor]) -> tuple[PreTrainedModel, dict[str, list[object]]]:
    """Return a model with its weights, and which names of weights had none, another shape or no place."""
    with _one_load, stored_tensors(found.files) as stored:
        # The bar would go to the worker's log.
        transformers_logging.disable_progress_bar()
        asked: dict[str, Any] = {name: _Unread(tensor, views.get(name)) for name, tensor in stored.items()}
        # Without a folder, transformers takes weights as they are given.
        read: tuple[PreTrainedModel, dict[str, list[object]]] = type(found.skeleton).from_pretrained(
            None, config=found.config, state_dict=asked, dtype=found.dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    return read


@dataclass(frozen=True, slots=True)
class _Unread:
    """A tensor of a file that is read, into its place where it fits, once transformers indexes it to have all of it."""

    tensor: Stored
    view: torch.Tensor | None

    def __getitem__(self, index: object) -> torch.Tensor:
        if self.view is not None and self.tensor.fits(self.view):
            return self.tensor.read_into(self.view)
        read: torch.Tensor = self.tensor.tensor[index]
        return read


def _is_superfluous(modules: Mapping[str, nn.Module], key: str) -> bool:
    """Say whether a weight belongs to a module of the model that has no such weight, such as the bias of a layer without one.

    Weights of modules that the model does not have are ignored: they are of another head, or left over in older checkpoints.
    """
    parent, _, last = key.rpartition(".")
    module = modules.get(parent)
    return last in ("weight", "bias") and module is not None and not any(module.children()) and getattr(module, last, None) is None


def _longest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Take the smaller bound of model and tokenizer; a tokenizer without one says 10**30."""
    bounds = [getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(bound) for bound in bounds if isinstance(bound, int | float) and 0 < bound < 1e9]
    return min(known) if known else None
