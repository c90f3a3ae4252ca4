"""What the worker reads of a model folder: its tokenizer, and the bounds of the model's input. No weights, no server.

Texts become token ids here, by the rules of every engine (`texts.py`). The server gets nothing but ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from app.services_file import ConfigError, model_problem
from workers.gpu.engines.abstract import Task
from workers.gpu.engines.texts import Texts, check_ids
from workers.gpu.errors import one_line

_HEADS = frozenset({"score", "classifier", "classification_head", "classification_heads", "v_head", "value_head"})
_CLASSIFIERS = ("ForSequenceClassification",)


@dataclass(frozen=True, slots=True)
class Reader:
    """Texts to ids, and the checks of ids; `ends` are the ids that end a generated text, `vocabulary` how many ids there are."""

    texts: Texts
    vocabulary: int
    ends: frozenset[int]

    def check(self, batch: Sequence[Sequence[int]], what: str, longest: int, more: int = 0) -> None:
        """Refuse ids that the model cannot read, naming the index; `more` tokens are to follow each. Raises `BadInput`."""
        check_ids(batch, what, vocabulary=self.vocabulary, longest=longest, more=more)


def read_folder(folder: Path, task: Task, separator: str) -> Reader:
    """Read a model folder, and refuse a model of another kind than the task: vLLM would score with weights that are not there.

    Raises `ConfigError`.
    """
    if problem := model_problem(folder):
        raise ConfigError(problem)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{folder} cannot be read: {one_line(error)}") from error
    kinds = [str(name) for name in config.architectures or ()]
    is_classifier = any(name.endswith(_CLASSIFIERS) for name in kinds)
    if is_classifier != (task == "score"):
        raise ConfigError(f"{folder} is a {' or '.join(kinds) or 'model of no known kind'}: it is no model for task {task!r}")
    if is_classifier and config.num_labels != 1:
        raise ConfigError(f"{folder} has {config.num_labels} labels: a reward model has one")
    if is_classifier and not getattr(config.get_text_config(), "classifier_from_token", None) and not _has_head(folder):
        raise ConfigError(f"{folder} has no weights of a head that scores: it is no model for task {task!r}")
    texts = Texts(tokenizer, separator)
    return Reader(texts, int(config.get_text_config().vocab_size), _end_ids(folder, config, texts))


def _has_head(folder: Path) -> bool:
    """Say whether the weights of a scoring head are among the tensors; without them vLLM 0.32 scores with random memory.

    A folder whose tensors cannot be listed without loading them passes.
    """
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            names.update(tensors.keys())
    return not names or any(part in _HEADS for name in names for part in name.split("."))


def _end_ids(folder: Path, config: PreTrainedConfig, texts: Texts) -> frozenset[int]:
    """Return the ids that end a text, from the generation settings beside the model, its configuration and its tokenizer."""
    named = [getattr(config.get_text_config(), "eos_token_id", None), texts.end_id]
    if (folder / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    several = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in several if isinstance(token, int))
