"""What transformers answers, an input at a time, so without padding; and the interpreter that has vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.needed import needed

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-vllm"


def real_python() -> Path:
    """Return the interpreter that has vLLM. Without it a test is skipped, or fails where `CI` is set."""
    needed("" if (ENVIRONMENT / ".installed").exists() else "there is no .venv-vllm: `make test-real ONLY=vllm` builds it")
    return ENVIRONMENT / "bin" / "python"


def scores_of_texts(folder: Path, texts: Sequence[str]) -> list[float]:
    """Score whole texts with transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    # Without a padding id, transformers itself takes the last position of a single text.
    model.config.pad_token_id = None
    with torch.inference_mode():
        return [float(model(**tokenizer(text, return_tensors="pt")).logits[0, 0]) for text in texts]


def expected_scores(folder: Path, items: Sequence[dict[str, str]]) -> list[float]:
    """Score pairs of plain text with transformers."""
    return scores_of_texts(folder, [f"{item['prompt']}\n{item['response']}" for item in items])


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


def greedy_texts(folder: Path, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Continue prompts greedily with transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, max_new_tokens=max_tokens, do_sample=False)[0, ids.shape[1] :]
        out.append(tokenizer.decode(whole, skip_special_tokens=True))
    return out
