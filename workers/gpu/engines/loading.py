"""From a model folder to a model and its tokenizer.

Only the local folder is read: never the network, never code that comes with a model, never pickled objects. A checkpoint that lacks
weights of its architecture is refused. Transformers would fill them with random numbers, and a reward model would score at random.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from app.services_file import ConfigError, model_problem
from workers.gpu.engines.abstract import Task
from workers.gpu.errors import one_line
from workers.memory import MIB

Dtype = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# transformers changes defaults of the whole process (dtype, initialisers) while it loads.
_one_load = threading.Lock()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on the CPU in evaluation mode, its tokenizer, the longest input in tokens (none: no bound), how many token ids there are."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    longest: int | None
    vocabulary: int


def load(folder: Path, task: Task, dtype: Dtype) -> Loaded:
    """Load a model folder.

    Raises `ConfigError` where the folder is no model folder, a file in it is broken, or it holds another kind of model.
    """
    if problem := model_problem(folder):
        raise ConfigError(problem)
    try:
        model, tokenizer, lacking, strange = _read(folder, task, dtype)
    except Exception as error:
        raise ConfigError(f"{folder} cannot be loaded: {one_line(error)}") from error
    if task == "score" and model.config.num_labels != 1:
        raise ConfigError(f"{folder} has {model.config.num_labels} labels: a reward model has one")
    if lacking:
        raise ConfigError(f"{folder} has no fitting weights for {lacking[0]} ({len(lacking)} in all): it is no model for task {task!r}")
    if strange:
        raise ConfigError(f"{folder} has weights of another architecture than its config.json names: {strange[0]} ({len(strange)} in all)")
    embeddings = model.get_input_embeddings().weight
    if not isinstance(embeddings, torch.Tensor):
        raise ConfigError(f"{folder} has no token embeddings")
    model.requires_grad_(False)
    model.train(False)
    return Loaded(model, tokenizer, _longest(model, tokenizer), embeddings.shape[0])


def weights_mb(folder: Path, dtype: Dtype) -> float:
    """Return the MiB of the weights in a folder's safetensors files, in this dtype; only the headers are read. Raises `ConfigError`."""
    numbers = 0
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                numbers += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - not a dict
        except Exception as error:
            raise ConfigError(f"{folder} cannot be loaded: {one_line(error)}") from error
    return numbers * _DTYPES[dtype].itemsize / MIB


def _read(folder: Path, task: Task, dtype: Dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str], list[str]]:
    """Return model, tokenizer, and the names of two kinds of weights: missing or of another shape, and without a place in the model."""
    loader = AutoModelForSequenceClassification if task == "score" else AutoModelForCausalLM
    with _one_load:
        # The bar would go to the worker's log.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        found: tuple[PreTrainedModel, dict[str, list[object]]] = loader.from_pretrained(  # type: ignore[assignment]
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype=_DTYPES[dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model, info = found
    lacking = sorted(str(key) for part in ("missing_keys", "mismatched_keys") for key in info[part])
    modules = dict(model.named_modules())
    return model, tokenizer, lacking, sorted(str(key) for key in info["unexpected_keys"] if _has_no_place(modules, str(key)))


def _has_no_place(modules: Mapping[str, nn.Module], key: str) -> bool:
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
