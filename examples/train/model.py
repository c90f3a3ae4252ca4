"""The tiny models of this example: the one that is trained, and a teacher that has learnt how a rollout is written.

`python -m examples.train.model FOLDER` makes the teacher. By the `services.toml` in it a stack serves it under the folder's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.train.task import OPERATORS

DIGITS = "0123456789"
LETTERS = [*DIGITS, "x", *OPERATORS, "?", "f", "<pad>", "</s>"]
PROMPT = [LETTERS.index("f")]
LESSONS = 300
SERVICE = """[services.{name}]
engine = "torch"
task = "logprobs"
model = "."
memory_mb = 200
"""


def make_model() -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Return a model that knows nothing, of about 190,000 parameters, and its tokenizer of single letters."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(LETTERS)}, merges=[]))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(
        vocab_size=len(LETTERS), initializer_range=0.1, pad_token_id=wrapped.pad_token_id, eos_token_id=wrapped.eos_token_id, **sizes
    )
    return Qwen2ForCausalLM(config), wrapped


def make_teacher(folder: Path) -> None:
    """Train a model on texts of the right form, `f`, digit, digit, operator, all drawn at random, and save it with its declaration."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, tokenizer = make_model()
    digits, operators = (torch.tensor([LETTERS.index(letter) for letter in letters]) for letters in (DIGITS, OPERATORS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(LESSONS):
        drawn = (letters[torch.randint(len(letters), (64, 1))] for letters in (digits, digits, operators))
        texts = torch.cat([torch.tensor([PROMPT] * 64), *drawn], dim=1)
        model(texts, labels=texts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "services.toml").write_text(SERVICE.format(name=folder.name), encoding="utf-8")


if __name__ == "__main__":
    make_teacher(Path(sys.argv[1]).absolute())
