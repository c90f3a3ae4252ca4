"""Tiny models with real weights, for tests, the demo and a first look: made in seconds, without a network.

A two-layer Qwen2 (hidden 64 unless asked otherwise, heads of 32, 1 key-value head, vocabulary 512) and a byte-level BPE tokenizer
trained on the lines below. Weights are drawn wider than transformers draws them: with its own, context hardly
moves the output, and a wrong implementation would look right.

    python -m app.tiny_models DIR     makes DIR/rm-small, DIR/teacher-0 and DIR/services.toml
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from app.services_file import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind = Literal["reward", "teacher"]

VOCABULARY = 512
HIDDEN = 64
END = "<|endoftext|>"
MARK = "tiny.json"
_FORMAT = 1

_TEMPLATE = "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"

_LINES = """\
The scheduler takes every waiting action in, decides, and hands it to a node that can start it now.
A trajectory thinks for some seconds, then asks for something outside: a command, a reward, a search.
def add(left, right):\n    return left + right\n\nassert add(2, 3) == 5
for index in range(10):\n    print(index, index * index)
Question: how many cores does the test suite need? Answer: as many as are free, and it gives them back.
The quick brown fox jumps over the lazy dog while seven wizards pack my box with five dozen jugs.
class Node:\n    def __init__(self, name, cores):\n        self.name = name\n        self.cores = cores
error: expected an indented block after the function definition on line 42
pytest -q tests/ passed 128, failed 3, skipped 0 in 12.5 seconds
import json\nwith open('result.json') as file:\n    data = json.load(file)
Rewards are numbers, higher is better; a teacher gives the log-probability of each token given those before it.
git diff --stat && git commit -m 'fix the counter' && git push origin main
When memory is short, the least recently used model is moved to the host, and comes back when it is asked for.
What is the capital of France? Paris. What is the capital of Japan? Tokyo. And of Egypt? Cairo.
"""

_SERVICES = """\
[services.rm-small]
engine = "torch"
task = "score"
model = "rm-small"
cells = [1]
memory_mb = 200
max_concurrency = 2

[services.teacher-0]
engine = "torch"
task = "logprobs"
model = "teacher-0"
cells = [1]
memory_mb = 200
max_concurrency = 2
"""


def make_tiny(folder: Path, kind: Kind = "reward", seed: int = 0, hidden: int = HIDDEN) -> Path:
    """Make a tiny reward model or teacher; one that is there already, whole and of the same seed and size, is kept.

    `hidden`, a multiple of 32, is the model's width: 64 makes half a megabyte of weights, 768 makes 41 MB.
    The folder appears at once and whole; of two processes that make it, one wins and both are served.
    Raises `ConfigError` where something else is in the way.
    """
    mark: dict[str, object] = {"format": _FORMAT, "kind": kind, "seed": seed}
    if hidden != HIDDEN:
        mark["hidden"] = hidden
    if _is_whole(folder, mark):
        return folder
    _refuse_strangers(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from error
    try:
        _write_model(draft, kind, seed, hidden)
        (draft / MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")
        draft.chmod(0o755)
        _put_in_place(draft, folder, mark)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def make_services(folder: Path, seed: int = 0) -> Path:
    """Make `rm-small`, `teacher-0` and a services file naming them; a services file that is there is left as it is.

    Returns the services file's path. Raises `ConfigError`.
    """
    make_tiny(folder / "rm-small", "reward", seed)
    make_tiny(folder / "teacher-0", "teacher", seed + 1)
    file = folder / "services.toml"
    if not file.exists():
        handle, draft = tempfile.mkstemp(prefix=".services-", dir=folder)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(_SERVICES)
        os.chmod(draft, 0o644)
        os.replace(draft, file)
    return file


def _is_whole(folder: Path, mark: dict[str, object]) -> bool:
    """Tell whether a folder was made here with the same mark, which is written last."""
    try:
        return bool(json.loads((folder / MARK).read_text(encoding="utf-8")) == mark) and (folder / "model.safetensors").is_file()
    except (OSError, ValueError):
        return False


def _refuse_strangers(folder: Path) -> None:
    """Never replace what was not made here."""
    if folder.is_dir() and not (folder / MARK).is_file() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: is there already and is no tiny model; it is left alone")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; it is left alone")


def _put_in_place(draft: Path, folder: Path, mark: dict[str, object]) -> None:
    """Rename the draft to the folder. A whole folder cannot be renamed over, so an outdated one steps aside first."""
    while True:
        try:
            draft.rename(folder)
            return
        except OSError as error:
            if _is_whole(folder, mark):
                return
            if not folder.exists():
                raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from error
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        try:
            folder.rename(old)
        except FileNotFoundError:
            continue
        finally:
            shutil.rmtree(old, ignore_errors=True)


def _write_model(folder: Path, kind: Kind, seed: int, hidden: int) -> None:
    """Draw the weights from the seed and save model and tokenizer."""
    import torch
    from safetensors import SafetensorError
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    trained = _train_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=END, pad_token=END, model_max_length=VOCABULARY, chat_template=_TEMPLATE
    )
    end = trained.token_to_id(END)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=end,
        eos_token_id=end,
        bos_token_id=None,
    )
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config) if kind == "reward" else Qwen2ForCausalLM(config)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[1] ** 0.5, generator=draws)
    disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # as on a full disk
        raise ConfigError(f"{folder}: the model cannot be written: {error}") from error
    for file in folder.iterdir():
        file.chmod(0o644)


def _train_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokenizer, always the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_LINES.splitlines(), trainer)
    return tokenizer


def main(words: Sequence[str] | None = None) -> int:
    """Run `python -m app.tiny_models`; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m app.tiny_models", description="Make tiny models and a services.toml naming them.")
    parser.add_argument("folder", type=Path, help="where to put them")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    asked = parser.parse_args(words)
    try:
        print(make_services(asked.folder, asked.seed))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
