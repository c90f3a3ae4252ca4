"""What a model folder says of its weights: in which files they are, which dtype they have, which ids end a text.

Both engines read this here, so that a service means the same with either. No weights are loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig

from app.services_file import DTYPES, ConfigError, DeclaredDtype, Dtype

_OF_TENSORS: dict[str, Dtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights: the shards that the index names, or `model.safetensors`, or what there is; none: all are pickled.

    Raises `ConfigError` where a shard is missing, `OSError`, `ValueError` or `LookupError` where the index cannot be read.
    """
    if (folder / _INDEX).is_file():
        names = sorted({str(name) for name in json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()})
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise ConfigError(f"{_INDEX} names {name}, which is not in the folder")
        return [folder / name for name in names]
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def resolve_dtype(folder: Path, declared: DeclaredDtype) -> Dtype:
    """Return what weights are to be held and computed in; `auto` is what the checkpoint says.

    That is `dtype` or `torch_dtype` of its config.json, otherwise the dtype of its first tensor of floating point, otherwise float32.
    Raises `ConfigError` where config.json names another dtype, and errors of all kinds where files are damaged.
    """
    if declared != "auto":
        return declared
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for table in (config, config.get("text_config") or {}):
        said = table.get("dtype") or table.get("torch_dtype")
        if said is None:
            continue
        if said not in DTYPES:
            raise ConfigError(f"its config.json says dtype {said!r}: declare dtype as one of {', '.join(DTYPES)}")
        return DTYPES[DTYPES.index(said)]
    return _dtype_of_tensors(folder)


def end_ids(folder: Path, config: PreTrainedConfig, end_id: int | None) -> frozenset[int]:
    """Return the ids that end a text: of the model's configuration, the generation settings beside it, and `end_id` of its tokenizer."""
    named = [getattr(config.get_text_config(), "eos_token_id", None), end_id]
    if (folder / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    several = [token for entry in named for token in (entry if isinstance(entry, list) else [entry])]
    return frozenset(token for token in several if isinstance(token, int))


def _dtype_of_tensors(folder: Path) -> Dtype:
    for file in weight_files(folder)[:1]:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                if (found := _OF_TENSORS.get(tensors.get_slice(name).get_dtype())) is not None:
                    return found
    return "float32"
