"""What transformers answers, an input at a time, so without padding; and the interpreter that has vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = Path(__file__).resolve().parents[3] / ".venv-vllm"


def real_python() -> Path:
    """Return the interpreter that has vLLM. Without it a test is skipped, or fails where `CI` is set."""
    if not (ENVIRONMENT / ".installed").exists():
        missing = "there is no .venv-vllm: `make test-vllm` builds it"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    return ENVIRONMENT / "bin" / "python"


def expected_scores(folder: Path, items: Sequence[dict[str, str]]) -> list[float]:
    """Score with transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        texts = [f"{item['prompt']}\n{item['response']}" for item in items]
        return [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]


def expected_logprobs(folder: Path, sequences: Sequence[list[int]]) -> list[list[float]]:
    """Compute log-probs with transformers."""
    known = known_logprobs(folder, sequences)
    return [[float(one[place, token]) for place, token in enumerate(ids[1:])] for one, ids in zip(known, sequences, strict=True)]


def known_logprobs(folder: Path, sequences: Sequence[list[int]]) -> list[Any]:
    """Compute log-probs of the whole vocabulary at each position with transformers, as a tensor for each sequence."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1) for ids in sequences]
