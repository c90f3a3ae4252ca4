"""From a score item to the token ids that the reward model reads, and from a prompt to those that a model continues.

- Prompt and response are plain text: the text is prompt + separator + response, or what the service's score template makes of them. It is
  tokenized as one text with the special tokens that the tokenizer adds by itself. No pair encoding.
- There is no prompt: the response is the whole text, tokenized likewise.
- The prompt is a list of messages: prompt and response are one conversation (a response of plain text is what the
  assistant says), written out by the service's chat template, or the tokenizer's own, which also sets all special tokens.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from transformers import PreTrainedTokenizerBase

from app.services_file import ConfigError, ServiceConfig
from workers.gpu.errors import BadInput
from workers.gpu.items import Message, Prompt, ScoreItem

_PLACEHOLDERS = re.compile(r"\{(prompt|response)\}")


@dataclass(frozen=True, slots=True)
class Wording:
    """What a service says of how its inputs are put together; see the keys of the services file."""

    separator: str = "\n"
    score_template: str | None = None
    chat_template: Path | None = None

    @classmethod
    def of(cls, config: ServiceConfig) -> Self:
        """Return what a service's table says."""
        return cls(config.separator, config.score_template, config.chat_template)

    def plain(self, prompt: str, response: str) -> str:
        """Put prompt and response of plain text together."""
        if self.score_template is None:
            return f"{prompt}{self.separator}{response}"
        texts = {"prompt": prompt, "response": response}
        return _PLACEHOLDERS.sub(lambda found: texts[found[1]], self.score_template)


class Texts:
    """A tokenizer and the rules above. Safe for many threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, wording: Wording) -> None:
        """Read the chat template that the wording names. Raises `ConfigError` where it cannot be read."""
        self._tokenizer = tokenizer
        self._wording = wording
        self._chat_template = None if wording.chat_template is None else _read(wording.chat_template)
        # A fast tokenizer may change its own settings at the start of a call, and panics if another call is running.
        self._one_call = threading.Lock()

    def score_ids(self, items: Sequence[ScoreItem]) -> list[list[int]]:
        """Return the token ids of each item. Raises `BadInput` naming the index where a template is missing or refuses."""
        return [self._item_ids(item, index) for index, item in enumerate(items)]

    def prompt_ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of prompts; after a conversation it is the model's turn. Raises `BadInput` as `score_ids`."""
        return [self._prompt_ids(prompt, index) for index, prompt in enumerate(prompts)]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        with self._one_call:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def end_id(self) -> int | None:
        """The id that ends a text, where the tokenizer has one."""
        end = self._tokenizer.eos_token_id
        return end if isinstance(end, int) else None

    def _item_ids(self, item: ScoreItem, index: int) -> list[int]:
        conversation = item.conversation()
        if conversation is not None:
            return self._ids(self._written_out(conversation, f"items[{index}]", "prompt and response"), special=False)
        if item.prompt is None:
            return self._ids(str(item.response), special=True)
        return self._ids(self._wording.plain(str(item.prompt), str(item.response)), special=True)

    def _prompt_ids(self, prompt: Prompt, index: int) -> list[int]:
        if isinstance(prompt, str):
            return self._ids(prompt, special=True)
        return self._ids(self._written_out(prompt, f"prompts[{index}]", "it", to_answer=True), special=False)

    def _written_out(self, conversation: list[Message], where: str, what: str, *, to_answer: bool = False) -> str:
        if not (self._chat_template or self._tokenizer.chat_template):
            raise BadInput(f"{where}: the model has no chat template: give {what} as plain text")
        try:
            messages = [message.model_dump() for message in conversation]
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=self._chat_template, tokenize=False, add_generation_prompt=to_answer
                )
            )
        except Exception as error:
            raise BadInput(f"{where}: the model's chat template refuses the conversation: {error}") from error

    def _ids(self, text: str, *, special: bool) -> list[int]:
        with self._one_call:
            return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template: {file} cannot be read: {error}") from error


def check_ids(batch: Sequence[Sequence[int]], what: str, *, vocabulary: int, longest: int | None, more: int = 0) -> None:
    """Refuse token ids that a model cannot read, naming the index.

    It has `vocabulary` ids and reads at most `longest` tokens (none: no bound), `more` of which are to follow. Raises `BadInput`.
    """
    for index, ids in enumerate(batch):
        if not ids:
            raise BadInput(f"{what}[{index}]: has no tokens")
        if longest is not None and len(ids) + more > longest:
            asked = f"{len(ids)} tokens" + (f" and {more} to come" if more else "")
            raise BadInput(f"{what}[{index}]: {asked}, the model reads at most {longest}")
        if (largest := max(ids)) >= vocabulary:
            raise BadInput(f"{what}[{index}]: token id {largest} is outside the vocabulary of {vocabulary}")
