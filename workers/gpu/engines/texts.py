"""From a score item to the token ids that the reward model reads.

- Prompt and response are plain text: the text is prompt + separator + response, tokenized as one text with the
  special tokens that the tokenizer adds by itself. No pair encoding.
- The prompt is a list of messages: prompt and response are one conversation (a response of plain text is what the
  assistant says), written out by the tokenizer's chat template, which also sets all special tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from workers.gpu.errors import BadInput
from workers.gpu.items import Message, ScoreItem


class Texts:
    """A tokenizer and the rules above. Safe for many threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
        """Use `separator` between plain texts."""
        self._tokenizer = tokenizer
        self._separator = separator
        # A fast tokenizer may change its own settings at the start of a call, and panics if another call is running.
        self._one_call = threading.Lock()

    def score_ids(self, items: Sequence[ScoreItem]) -> list[list[int]]:
        """Return the token ids of each item. Raises `BadInput` naming the index where a template is missing or refuses."""
        return [self._item_ids(item, index) for index, item in enumerate(items)]

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of plain prompts."""
        return [self._ids(prompt, special=True) for prompt in prompts]

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
            return self._ids(self._written_out(conversation, index), special=False)
        return self._ids(f"{item.prompt}{self._separator}{item.response}", special=True)

    def _written_out(self, conversation: list[Message], index: int) -> str:
        if not self._tokenizer.chat_template:
            raise BadInput(f"items[{index}]: the model has no chat template: give prompt and response as plain text")
        try:
            messages = [message.model_dump() for message in conversation]
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:
            raise BadInput(f"items[{index}]: the model's chat template refuses the conversation: {error}") from error

    def _ids(self, text: str, *, special: bool) -> list[int]:
        with self._one_call:
            return [int(token) for token in self._tokenizer(text, add_special_tokens=special)["input_ids"]]


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
