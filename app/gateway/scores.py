"""Scores of reward models: vLLM's `/classify`, `/score`, `/rerank` and `/pooling`, slime's `rm_url`, OpenRLHF's remote reward.

| path | scores |
|---|---|
| `/classify`, `/pooling` | whole texts, as they are; or a conversation |
| `/v1/embeddings` | whole texts, as SGLang does for reward models: the vector of a text is its logit alone |
| `/score`, `/v1/score`, `/rerank`, `/v1/rerank`, `/v2/rerank` | a prompt and a response, put together as the service says |
| `/rm/SERVICE` | slime: a prompt and a response; the answer is the number |
| `/reward/SERVICE` | OpenRLHF: whole texts, its `query`; `prompts` and `labels` are not looked at |

As with vLLM, the answer is the sigmoid of the model's logit unless `use_activation` is false; unlike there, also where the model's
configuration has `problem_type: regression`, which is not known here. slime, OpenRLHF and callers of `/v1/embeddings` get the logit.

Each call is one action, whatever the number of its texts. A score that is no number, or that could not be computed, is an error.

Calls are held as long as they take. But slime and OpenRLHF give up on a call, so theirs end with 503 after `TANGRAM_GATEWAY_REWARD_S`;
the action keeps its place in the queue, and the same call, sent again, gets its result.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Sequence
from typing import Any, Literal, Self

from fastapi.responses import Response
from pydantic import BaseModel, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from app.gateway import calls
from app.gateway.context import CallerOf, Gateway, GatewayOf
from app.gateway.errors import BadRequest
from app.gateway.services import Key, Message, ModelBody, answer_error, as_many, finite, heading, service_of
from app.gateway.sessions import Caller, digest
from app.gateway.shape import shape_router
from tangram import calls as words

router = shape_router("scores", answer_error, tags=["scores"])
rewards = shape_router("rewards", answer_error, tags=["scores"])

Texts = str | list[str]


class ActivatedBody(ModelBody):
    """What all of vLLM's scoring shapes have."""

    use_activation: bool | None = None

    def activated(self, logits: Sequence[float]) -> list[float]:
        """Return the scores that stand in the answer."""
        return list(logits) if self.use_activation is False else [_sigmoid(logit) for logit in logits]


class PoolingBody(ActivatedBody):
    """Texts, or one conversation."""

    input: Texts | None = None
    messages: list[Message] | None = None
    task: Literal["classify"] | None = None

    def items(self) -> list[dict[str, Any]]:
        """Return what is to be scored."""
        if (self.input is None) == (self.messages is None):
            raise BadRequest("input: give either input or messages")
        if self.messages is not None:
            return [{"prompt": [message.plain() for message in self.messages], "response": []}]
        return [{"response": text} for text in _listed(self.input)]


class ScoreBody(ActivatedBody):
    """Texts in pairs: one with one, one with each of several, or several with as many."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    _PAIRS = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))

    @model_validator(mode="after")
    def _is_a_pair(self) -> Self:
        if self._given() not in self._PAIRS:
            raise PydanticCustomError("pair", "give queries and documents, queries and items, text_1 and text_2, or data_1 and data_2")
        return self

    def _given(self) -> tuple[str, ...]:
        """Return which of the texts are there: null is none."""
        return tuple(dict.fromkeys(name for pair in self._PAIRS for name in pair if getattr(self, name) is not None))

    def pairs(self) -> list[tuple[str, str]]:
        """Return prompts and responses. Raises `BadRequest` where their numbers do not fit."""
        first, second = (_listed(getattr(self, name)) for name in self._given())
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise BadRequest(f"{len(first)} texts cannot be paired with {len(second)}: give one, or as many")
        return list(zip(first, second, strict=True))


class RerankBody(ActivatedBody):
    """A query, and documents to be ordered by how well they answer it; `top_n` of them, 0 for all."""

    query: str
    documents: list[str]
    top_n: int = Field(0, ge=0)


class EmbeddingsBody(ModelBody):
    """Texts whose vectors are asked for. Services give one number for a text, so there are no other `dimensions`."""

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Literal[1] | None = None

    def written(self, logit: float) -> list[float] | str:
        """Return the vector of a text: a list, or the bytes of its 32-bit floats in base64, which OpenAI's own client asks for."""
        return [logit] if self.encoding_format == "float" else base64.b64encode(struct.pack("<f", logit)).decode()


class SlimeBody(BaseModel):
    """What slime's `remote_rm` sends."""

    prompt: str | list[Message]
    response: str
    label: Any = None


class OpenRlhfBody(BaseModel):
    """What OpenRLHF sends to a remote reward model."""

    query: list[str]
    prompts: Any = None
    labels: Any = None


@router.post("/classify")
async def classify(body: PoolingBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> dict[str, Any]:
    """Score whole texts; each has one class."""
    service, logits = await _score(body, body.items(), caller, gateway, request, key)
    rows = [{"index": index, "label": None, "probs": [score], "num_classes": 1} for index, score in enumerate(body.activated(logits))]
    return {**heading("classify", service), "data": rows}


@router.post("/pooling")
async def pooling(body: PoolingBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> dict[str, Any]:
    """Score whole texts."""
    service, logits = await _score(body, body.items(), caller, gateway, request, key)
    rows = [{"index": index, "object": "pooling", "data": [score]} for index, score in enumerate(body.activated(logits))]
    return {**heading("pool", service), "data": rows}


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingsBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> dict[str, Any]:
    """Score whole texts; the vector of each is its logit."""
    items = [{"response": text} for text in _listed(body.input)]
    service, logits = await _score(body, items, caller, gateway, request, key)
    rows = [{"index": index, "object": "embedding", "embedding": body.written(logit)} for index, logit in enumerate(logits)]
    return {**heading("embd", service), "data": rows}


@router.post("/score")
@router.post("/v1/score")
async def score(body: ScoreBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> dict[str, Any]:
    """Score pairs of texts."""
    items = [{"prompt": first, "response": second} for first, second in body.pairs()]
    service, logits = await _score(body, items, caller, gateway, request, key)
    rows = [{"index": index, "object": "score", "score": one} for index, one in enumerate(body.activated(logits))]
    return {**heading("score", service), "data": rows}


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> dict[str, Any]:
    """Order documents by their score, best first."""
    items = [{"prompt": body.query, "response": document} for document in body.documents]
    service, logits = await _score(body, items, caller, gateway, request, key)
    scores, best = body.activated(logits), sorted(range(len(logits)), key=lambda index: -logits[index])
    results = [
        {"index": index, "document": {"text": body.documents[index]}, "relevance_score": scores[index]}
        for index in best[: body.top_n or None]
    ]
    return {**heading("rerank", service), "results": results}


@rewards.post("/rm/{service}", response_model=float)
async def slime(body: SlimeBody, service: str, caller: CallerOf, gateway: GatewayOf, request: Request) -> Response:
    """Score one response; the answer is the number."""
    prompt = body.prompt if isinstance(body.prompt, str) else [message.plain() for message in body.prompt]

    items: list[dict[str, Any]] = [{"prompt": prompt, "response": body.response}]

    async def begin() -> str:
        (logit,) = await _logits(caller, service, items)
        return json.dumps(logit)

    return await _reward(gateway, caller, items, begin, request)


@rewards.post("/reward/{service}")
async def openrlhf(body: OpenRlhfBody, service: str, caller: CallerOf, gateway: GatewayOf, request: Request) -> Response:
    """Score whole texts; the answer has one reward each."""
    items: list[dict[str, Any]] = [{"response": text} for text in body.query]

    async def begin() -> str:
        logits = await _logits(caller, service, items)
        return json.dumps({"rewards": logits, "scores": logits, "extra_logs": {}})

    return await _reward(gateway, caller, items, begin, request)


async def _reward(gateway: Gateway, caller: Caller, items: list[dict[str, Any]], begin: Any, request: Request) -> Response:
    """Answer with the action that an earlier call for these very items has left behind, else with a new one.

    Raises `UnicodeEncodeError` for what is no text. What else a body may have, such as a label of any form, does not count.
    """
    what = json.dumps(items, ensure_ascii=False)
    what.encode()
    asked = digest(caller.job, request.url.path, what)
    answer = await gateway.runs.answer(asked, begin, gateway.settings.gateway_reward_s, request)
    return Response(answer, media_type="application/json")


async def _score(
    body: ModelBody, items: list[dict[str, Any]], caller: Caller, gateway: Gateway, request: Request, key: str | None
) -> tuple[str, list[float]]:
    service = await service_of(request, gateway, body.model, "score")
    return service, await _logits(caller, service, items, request, key)


async def _logits(
    caller: Caller, service: str, items: list[dict[str, Any]], request: Request | None = None, key: str | None = None
) -> list[float]:
    if not items:
        return []
    action = words.score(caller.job, service, items, {})
    return as_many(finite(await calls.run(caller, action, key=key, request=request)), items)


def _listed(texts: Texts | None) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts or ())


def _sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)) without an overflow."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1.0 + grown)
