"""What services are asked: pairs to score, token ids, prompts. Read from JSON, checked once, then typed.

Checks that need a model (its vocabulary, its longest input) are the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from tangram.arrays import ArrayError, unpack_ints
from tangram.wire import MOST_TOP_K
from workers.gpu.errors import BadInput

MOST_NEW_TOKENS = 1 << 17

T = TypeVar("T")


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Message(_Request):
    """One message of a conversation."""

    role: str = Field(min_length=1)
    """Who speaks, in the words of the model's chat template: `system`, `user`, `assistant`."""
    content: Words
    """What is said."""


def _kind_of_text(value: object) -> str:
    """Publish pydantic which of the two is meant, so that it complains about that one."""
    return "messages" if isinstance(value, list) else "text"


def _writable(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can name and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is no text: character {error.start} is half of a surrogate pair") from None
    return text


Words = Annotated[str, AfterValidator(_writable)]
Prompt = str | list[Message]
Text = Annotated[Annotated[Words, Tag("text")] | Annotated[list[Message], Tag("messages")], Discriminator(_kind_of_text)]


class ScoreItem(_Request):
    """A prompt and the response to be scored, both plain text, or a conversation; or a whole text, which is scored as it is."""

    prompt: Text | None = None
    """Plain text, or the messages so far; none where the response is the whole text."""
    response: Text
    """Plain text; after a prompt of messages also the messages that answer it."""

    @model_validator(mode="after")
    def _same_kind(self) -> ScoreItem:
        if not isinstance(self.prompt, list) and not isinstance(self.response, str):
            raise ValueError("a response of messages needs a prompt of messages")
        return self

    def conversation(self) -> list[Message] | None:
        """Return prompt and response as one conversation; none where they are plain text."""
        if not isinstance(self.prompt, list):
            return None
        answer = self.response
        return self.prompt + ([Message(role="assistant", content=answer)] if isinstance(answer, str) else answer)


class Sampling(_Request):
    """How to generate. Temperature 0 is greedy; otherwise the seed decides, prompt by prompt."""

    max_tokens: int = Field(default=64, ge=1, le=MOST_NEW_TOKENS)
    """Most tokens added to a prompt."""
    temperature: float = Field(default=0.0, ge=0.0, le=100.0)
    """Divides the logits."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seeds the draws; prompt i uses seed + i."""


class Reading(NamedTuple):
    """Token ids whose log-probs are asked for."""

    ids: list[int]
    top_k: int | None = None
    """How many of the most likely ids of each position are asked for, beside the ranks of `ids`; without it neither is."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What a teacher says about a sequence of n ids. Without `top_k` all but the log-probs are empty."""

    logprobs: list[float]
    """Natural log-probs of ids 1..n-1, each given all ids before it."""
    ranks: list[int] = field(default_factory=list)
    """For each of these ids, how many are more likely in its place, and 1."""
    top_ids: list[int] = field(default_factory=list)
    """The most likely ids of each of these places, as many for each, most likely first, the places one after the other."""
    top_logprobs: list[float] = field(default_factory=list)
    """The log-probs of `top_ids`."""


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

_ITEM = TypeAdapter(ScoreItem)
_SEQUENCE: TypeAdapter[list[int]] = TypeAdapter(TokenIds, config=ConfigDict(strict=True))
_TOP_K: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(ge=0, le=MOST_TOP_K)], config=ConfigDict(strict=True))
_PROMPT: TypeAdapter[Prompt] = TypeAdapter(Words, config=ConfigDict(strict=True))
_CONVERSATION: TypeAdapter[Prompt] = TypeAdapter(list[Message], config=ConfigDict(strict=True))


def read_items(raw: Sequence[object]) -> list[ScoreItem]:
    """Check items `{"prompt", "response"}`. Raises `BadInput` naming the index and field of the first that is wrong."""
    return [_read(_ITEM, item, f"items[{index}]") for index, item in enumerate(_listed(raw, "items"))]


def read_sequences(raw: Sequence[object] | Mapping[str, object]) -> list[list[int]]:
    """Check lists of token ids, each with one at least, that come as they are or packed. Raises `BadInput` naming the index."""
    if isinstance(raw, Mapping):
        return _unpacked(raw)
    return [_read(_SEQUENCE, ids, f"sequences[{index}]") for index, ids in enumerate(_listed(raw, "sequences"))]


def read_top_k(top_k: object) -> int | None:
    """Check how many of the most likely ids are asked for. Raises `BadInput`."""
    return None if top_k is None else _read(_TOP_K, top_k, "top_k")


def read_prompts(raw: Sequence[object]) -> list[Prompt]:
    """Check prompts, each of plain text or a conversation. Raises `BadInput` naming the index."""
    return [
        _read(_CONVERSATION if isinstance(prompt, list) else _PROMPT, prompt, f"prompts[{index}]")
        for index, prompt in enumerate(_listed(raw, "prompts"))
    ]


def read_sampling(max_tokens: int, temperature: float, seed: int) -> Sampling:
    """Check how to generate. Raises `BadInput` naming the field."""
    return _read(TypeAdapter(Sampling), {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}, "sampling")


def _unpacked(packed: Mapping[str, object]) -> list[list[int]]:
    """Return packed lists; each is known to hold whole numbers, and is looked at one by one only where it is wrong."""
    try:
        sequences = unpack_ints(packed)
    except ArrayError as error:
        raise BadInput(f"sequences.{error}") from error
    for index, ids in enumerate(sequences):
        if not ids or min(ids) < 0:
            _read(_SEQUENCE, ids, f"sequences[{index}]")
    return sequences


def _listed(raw: Sequence[object], what: str) -> Sequence[object]:
    if not isinstance(raw, list | tuple):
        raise BadInput(f"{what}: must be a list, not {type(raw).__name__}")
    return raw


def _read(adapter: TypeAdapter[T], raw: object, where: str) -> T:
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise BadInput(f"{place}: {first['msg'].removeprefix('Value error, ').replace(' after validation', '')}") from error
