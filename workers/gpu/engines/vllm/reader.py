"""What the worker reads of a model folder: its tokenizer, its dtype, and the bounds of the model's input. No weights, no server.

Texts become token ids here, by the rules of every engine (`engines/texts.py`). The server gets nothing but ids.

| `vllm.pooling` | architecture | what vLLM computes |
|---|---|---|
| `classify` | `…ForSequenceClassification`, with one label | the logit of the last token |
| `reward` | `…ForRewardModel`, which vLLM has itself | a value for each token, of which the last counts |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from app.services_file import ConfigError, Dtype, ServiceConfig, model_problem
from workers.gpu.engines.checkpoint import end_ids, resolve_dtype
from workers.gpu.engines.texts import Texts, Wording, check_ids
from workers.gpu.errors import one_line

_HEADS = frozenset({"score", "classifier", "classification_head", "classification_heads", "v_head", "value_head"})
_SUFFIX = {"classify": "ForSequenceClassification", "reward": "ForRewardModel"}


@dataclass(frozen=True, slots=True)
class Reader:
    """Texts to ids, and the checks of ids."""

    texts: Texts
    """The tokenizer and how it is used."""
    vocabulary: int
    """How many ids there are."""
    ends: frozenset[int]
    """The ids that end a generated text."""
    dtype: Dtype
    """What the weights are to be held and computed in."""

    def check(self, batch: Sequence[Sequence[int]], what: str, longest: int, more: int = 0) -> None:
        """Refuse ids that the model cannot read, naming the index; `more` tokens are to follow each. Raises `BadInput`."""
        check_ids(batch, what, vocabulary=self.vocabulary, longest=longest, more=more)


def read_folder(folder: Path, config: ServiceConfig) -> Reader:
    """Read the model folder of a service, and refuse a model of another kind: vLLM would score with weights that are not there.

    Raises `ConfigError`.
    """
    if problem := model_problem(folder):
        raise ConfigError(problem)
    try:
        model = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        dtype = resolve_dtype(folder, config.dtype)
    except Exception as error:
        raise ConfigError(f"{folder} cannot be read: {one_line(error)}") from error
    _must_be_of_its_kind(folder, model, config)
    texts = Texts(tokenizer, Wording.of(config))
    return Reader(texts, int(model.get_text_config().vocab_size), end_ids(folder, model, texts.end_id), dtype)


def adapter_rank(folder: Path) -> int:
    """Return the largest rank of a LoRA adapter, from its adapter_config.json. Raises `ConfigError` where it is of another kind."""
    try:
        said = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if said.get("peft_type") != "LORA":
            raise ConfigError(f"adapter: {folder} is of type {said.get('peft_type')!r}: vLLM takes LORA")
        return max(int(rank) for rank in [said["r"], *(said.get("rank_pattern") or {}).values()])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"adapter: adapter_config.json of {folder} cannot be read: {one_line(error)}") from error


def _must_be_of_its_kind(folder: Path, model: PreTrainedConfig, config: ServiceConfig) -> None:
    kinds = [str(name) for name in model.architectures or ()]
    shown = " or ".join(kinds) or "model of no known kind"
    found = next((pooling for pooling, suffix in _SUFFIX.items() if any(name.endswith(suffix) for name in kinds)), None)
    if (found is not None) != (config.task == "score"):
        raise ConfigError(f"{folder} is a {shown}: it is no model for task {config.task!r}")
    if found is None:
        return
    if found != config.vllm.pooling:
        raise ConfigError(f"{folder} is a {shown}: declare vllm.pooling = {found!r} for it, not {config.vllm.pooling!r}")
    if found == "classify" and model.num_labels != 1:
        raise ConfigError(f"{folder} has {model.num_labels} labels: a reward model has one")
    if not getattr(model.get_text_config(), "classifier_from_token", None) and not _has_head(folder):
        raise ConfigError(f"{folder} has no weights of a head that scores: it is no model for task {config.task!r}")


def _has_head(folder: Path) -> bool:
    """Say whether the weights of a scoring head are among the tensors; without them vLLM 0.32 scores with random memory.

    A folder whose tensors cannot be listed without loading them passes.
    """
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            names.update(tensors.keys())
    return not names or any(part in _HEADS for name in names for part in name.split("."))
