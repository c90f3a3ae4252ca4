"""Figures of loading a model for the torch engine: how much of host memory that takes at most, in sizes of the model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bench.figures.registry import figure
from bench.tools import peak_growth

LARGE = {
    "vocab_size": 512, "hidden_size": 1280, "intermediate_size": 3584, "num_hidden_layers": 2, "num_attention_heads": 10,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
"""130 MiB."""


@figure("×")
def model_loading() -> float:
    """Return growth of memory while a model is loaded as it is stored, over its size."""
    return _growth("float32")


@figure("×")
def model_conversion() -> float:
    """Return growth of memory while a model is loaded in half of the precision in which it is stored, over its size then."""
    return _growth("bfloat16")


def _growth(dtype: str) -> float:
    import torch
    import transformers

    from app.tiny_models import make_services
    from workers.gpu.engines.loading import load

    with tempfile.TemporaryDirectory(prefix="tangram-figures-") as folder:
        models, large = make_services(Path(folder)).parent, Path(folder, "large")
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LARGE)).save_pretrained(large, max_shard_size="50MB")
        for file in (models / "teacher-0").glob("tokenizer*"):
            shutil.copy(file, large)

        def loaded_mb(model: Path) -> float:
            loaded = load(model, "logprobs", dtype, lambda layout: torch.zeros(layout.size_bytes, dtype=torch.uint8))
            return loaded.layout.size_bytes / (1 << 20)

        loaded_mb(models / "teacher-0")
        with peak_growth() as growth:
            size_mb = loaded_mb(large)
            return growth() / size_mb
