"""Models with random weights, made in place from a configuration of transformers: nothing is downloaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from app.tiny_models import VOCABULARY, _train_tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a Qwen2 is: width, width of the inner layer, layers, heads, key-value heads."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int

    def config(self) -> Qwen2Config:
        """Return its configuration, with the small vocabulary of the tiny models and one label."""
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            pad_token_id=0,
            eos_token_id=0,
            bos_token_id=None,
        )
        config.num_labels = 1
        return config


def write(folder: Path, shape: Shape, *, reward: bool, seed: int, dtype: torch.dtype, device: str) -> int:
    """Draw the weights on the device, save model and tokenizer, and return the bytes of the weights."""
    kind: Any = Qwen2ForSequenceClassification if reward else Qwen2ForCausalLM
    model = kind(shape.config()).to(dtype) if device == "cpu" else _made_on(device, kind, shape, dtype)
    draws = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wider than transformers draws them, so that what is read moves what is said.
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5, generator=draws)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=_train_tokenizer(), model_max_length=2048)


def _made_on(device: str, kind: Any, shape: Shape, dtype: torch.dtype) -> Any:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return kind(shape.config())
    finally:
        torch.set_default_dtype(usual)
