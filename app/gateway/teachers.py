"""Teachers and judges: log-probs of given tokens, and texts, in the shapes of vLLM, prime-rl, SGLang and OpenAI.

| path | gives |
|---|---|
| `/v1/completions` with `prompt_logprobs` | the log-probs of the prompts' own tokens (TRL); nothing is generated |
| `/v1/completions` | texts that continue texts |
| `/v1/chat/completions` | texts that answer a conversation, which the model's chat template writes out |
| `/inference/v1/generate` with `prompt_logprobs` | as the first, for one sequence (prime-rl) |
| `/generate` with `return_logprob` | the same as SGLang gives it (slime's teacher), with `top_logprobs_num` the most likely tokens, too |

Log-probs are those at temperature 1, as vLLM gives them whatever the temperature of a request; a log-prob of minus infinity is -9999, as
there. With `prompt_logprobs` of k, from 0 to `MOST_TOP_K`, a position has the given token first, with its rank, and then the k most likely
ones. The shape of SGLang has no ranks, and the most likely ones apart from the given one.

Each call is one action. Calls are held as long as they take.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi.responses import Response
from pydantic import AliasChoices, Field
from starlette.requests import Request

from app.gateway import calls
from app.gateway.context import CallerOf, GatewayOf
from app.gateway.errors import BadRequest
from app.gateway.services import Body, Key, Message, ModelBody, action_id, answer_error, as_many, heading, service_of
from app.gateway.sessions import Caller
from app.gateway.shape import shape_router
from tangram import calls as words
from tangram.results import Logprobs
from tangram.wire import MOST_TOP_K

router = shape_router("teachers", answer_error, tags=["teachers"])

LEAST_LOGPROB = -9999.0
"""What stands for a log-prob of minus infinity, which JSON does not have."""

COMPLETION_TOKENS, CHAT_TOKENS = 16, 1024
"""Most tokens that continue a text, and that answer a conversation, where the caller names no number."""

MOST_TEXTS = 8192
"""How many texts one call may ask for with `n`, over all of its prompts."""

TokenIds = list[int]


class GeneratingBody(ModelBody):
    """How to generate: temperature 0 is greedy; without a seed, each call draws anew."""

    n: int = Field(1, ge=1, le=1024)
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None

    def cut(self, text: str) -> tuple[str, str | None]:
        """Return a text up to the first of the words that stop it, and why it ended, where that is known."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
        return (text[: min(places)], "stop") if places else (text, None)


class CompletionsBody(GeneratingBody):
    """Prompts to be continued, or whose tokens' log-probs are asked for."""

    prompt: list[TokenIds] | TokenIds | str | list[str]
    max_tokens: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = None


class ChatBody(GeneratingBody):
    """A conversation to be answered."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))


class SamplingParams(Body):
    """What prime-rl asks for."""

    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = None
    seed: int | None = None
    n: Literal[1] = 1
    prompt_logprobs: int | None = None


class GenerateBody(ModelBody):
    """vLLM's tokens in, tokens out; only log-probs of the given tokens are served."""

    token_ids: TokenIds
    sampling_params: SamplingParams


class SglangParams(Body):
    """SGLang's sampling parameters; nothing is sampled."""

    max_new_tokens: Literal[0]
    temperature: float | None = None
    skip_special_tokens: bool = True


class SglangBody(ModelBody):
    """SGLang's request for the log-probs of given tokens."""

    input_ids: list[TokenIds] | TokenIds
    sampling_params: SglangParams
    return_logprob: Literal[True]
    logprob_start_len: Literal[0]
    top_logprobs_num: int = Field(0, ge=0, le=MOST_TOP_K)
    return_text_in_logprobs: Literal[False] = False


@router.post("/v1/completions")
async def completions(body: CompletionsBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> Response:
    """Continue texts, or give the log-probs of tokens."""
    service = await service_of(request, gateway, body.model, "logprobs")
    if body.prompt_logprobs is None:
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not prompts:
            raise BadRequest("prompt: is empty")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise BadRequest("prompt: token ids are served with prompt_logprobs only; to have them continued, give their text")
        texts = await _generate(
            body, prompts, COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens, caller, service, request, key
        )
        choices = [
            {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None, "prompt_logprobs": None}
            for index, (text, reason) in enumerate(map(body.cut, texts))
        ]
        return _json({**heading("cmpl", service, "text_completion"), "choices": choices})
    sequences = _sequences(body.prompt)
    _check_prompt_logprobs(body.prompt_logprobs, body.max_tokens)
    if body.n != 1:
        raise BadRequest("n: must be 1 with prompt_logprobs")
    found = await _logprobs(sequences, body.prompt_logprobs, caller, service, request, key)
    head = heading("cmpl", service, "text_completion")
    return await asyncio.to_thread(_completions, head, sequences, found)


@router.post("/v1/chat/completions")
async def chat(body: ChatBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> Response:
    """Answer a conversation."""
    service = await service_of(request, gateway, body.model, "logprobs")
    conversation = [message.plain() for message in body.messages]
    texts = await _generate(body, [conversation], body.max_tokens or CHAT_TOKENS, caller, service, request, key)
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": reason}
        for index, (text, reason) in enumerate(map(body.cut, texts))
    ]
    return _json({**heading("chatcmpl", service, "chat.completion"), "choices": choices})


@router.post("/inference/v1/generate")
async def generate(body: GenerateBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> Response:
    """Give the log-probs of one sequence of tokens."""
    if body.sampling_params.prompt_logprobs is None:
        raise BadRequest("sampling_params.prompt_logprobs: token ids are served with it only; /v1/completions continues texts")
    _check_prompt_logprobs(body.sampling_params.prompt_logprobs, body.sampling_params.max_tokens)
    service = await service_of(request, gateway, body.model, "logprobs")
    found = await _logprobs([body.token_ids], body.sampling_params.prompt_logprobs, caller, service, request, key)
    head: dict[str, Any] = {"request_id": action_id(), "choices": [], "kv_transfer_params": None}
    return await asyncio.to_thread(lambda: _with(head, "prompt_logprobs", _positions(body.token_ids, found, 0)))


@router.post("/generate")
async def sglang(body: SglangBody, caller: CallerOf, gateway: GatewayOf, request: Request, key: Key = None) -> Response:
    """Give the log-probs of tokens as SGLang does."""
    service = await service_of(request, gateway, body.model, "logprobs")
    sequences = _sequences(body.input_ids)
    found = await _logprobs(sequences, body.top_logprobs_num or None, caller, service, request, key)

    def answer() -> Response:
        rows = [_sglang_row(ids, found, index) for index, ids in enumerate(sequences)]
        return Response(f"[{','.join(rows)}]" if sequences is body.input_ids else rows[0], media_type="application/json")

    return await asyncio.to_thread(answer)


def _sglang_row(ids: TokenIds, found: Logprobs, index: int) -> str:
    """Return SGLang's answer for sequence `index` as JSON: for each position but the first `[log-prob, token, text]`, and the top ones."""
    head: dict[str, Any] = {"id": action_id(), "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(ids)}
    meta = json.dumps({**head, "completion_tokens": 0, "output_token_logprobs": []})[:-1]
    first = [f"[null,{ids[0]},null]"] if ids else []
    given = (_triple(value, token) for value, token in zip(found[index], ids[1:], strict=True))
    meta += f',"input_token_logprobs":[{",".join((*first, *given))}]'
    if len(found.top_ids):
        tops = (
            f"[{','.join(map(_triple, values, tokens))}]"
            for values, tokens in zip(found.top_logprobs[index], found.top_ids[index], strict=True)
        )
        meta += f',"input_top_logprobs":[{",".join((*(["null"] if ids else []), *tops))}],"output_top_logprobs":[]'
    return f'{{"text":"","meta_info":{meta}}}}}'


def _triple(value: float, token: int) -> str:
    return f"[{_bounded(value)!r},{token},null]"


async def _generate(
    body: GeneratingBody, prompts: Sequence[Any], max_tokens: int, caller: Caller, service: str, request: Request, key: str | None
) -> list[str]:
    """Return `n` texts for each prompt; those of the first prompt come first."""
    if max_tokens < 1:
        raise BadRequest("max_tokens: must be at least 1")
    _check_repeated(prompts, body.n, request)
    repeated = [prompt for prompt in prompts for _ in range(body.n)]
    seed = body.seed if body.seed is not None else secrets.randbelow(1 << 62)
    temperature = 1.0 if body.temperature is None else body.temperature
    action = words.generate(caller.job, service, repeated, max_tokens, temperature, seed, {})
    texts: list[str] = await calls.run(caller, action, key=key, request=request)
    return as_many(texts, repeated)


def _check_repeated(prompts: Sequence[Any], n: int, request: Request) -> None:
    """Refuse more than one call may ask for: a prompt goes to the service once for each of its `n` texts."""
    if n == 1:
        return
    if len(prompts) * n > MOST_TEXTS:
        raise BadRequest(f"n: {len(prompts)} prompts with {n} texts each are more than the {MOST_TEXTS} texts of one call")
    most = request.app.state.gateway.settings.gateway_body_mb * 2**20
    if sum(map(calls.size, prompts)) * n > most:
        raise BadRequest(f"n: {n} times these prompts is more than {most} bytes (TANGRAM_GATEWAY_BODY_MB)")


async def _logprobs(
    sequences: list[TokenIds], top_k: int | None, caller: Caller, service: str, request: Request, key: str | None
) -> Logprobs:
    """Return for each sequence of n tokens n-1 log-probs."""
    action = await asyncio.to_thread(words.logprobs, caller.job, service, sequences, {}, top_k=top_k)
    found: Logprobs = await calls.run(caller, action, key=key, request=request)
    as_many(found, sequences)
    return found


def _sequences(given: Sequence[Any]) -> list[TokenIds]:
    """Return sequences of token ids, given as several or as one. Raises `BadRequest` for texts."""
    if given == []:
        raise BadRequest("prompt: is empty")
    if all(isinstance(one, int) for one in given):
        return [list(given)]
    if not all(isinstance(one, list) for one in given):
        raise BadRequest("prompt: log-probs are given for token ids, not for texts: the ids of a text depend on its tokenizer")
    return given  # type: ignore[return-value]


def _check_prompt_logprobs(count: int, max_tokens: int | None) -> None:
    if not 0 <= count <= MOST_TOP_K:
        raise BadRequest(f"prompt_logprobs: must be from 0 to {MOST_TOP_K}, not {count}")
    if max_tokens is not None and max_tokens > 1:
        raise BadRequest("max_tokens: must be 0 or 1 with prompt_logprobs: nothing is generated beside log-probs")


def _completions(head: dict[str, Any], sequences: list[TokenIds], found: Logprobs) -> Response:
    choices = []
    for index, ids in enumerate(sequences):
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        choices.append(f'{json.dumps(choice)[:-1]},"prompt_logprobs":{_positions(ids, found, index)}}}')
    tokens = sum(map(len, sequences))
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    return _with({**head, "usage": usage}, "choices", f"[{','.join(choices)}]")


def _positions(ids: TokenIds, found: Logprobs, index: int) -> str:
    """Return vLLM's `prompt_logprobs` of sequence `index` as JSON: null for its first token, for each other what is known there.

    The given token comes first, as vLLM has it and prime-rl reads it. Written by hand: a list of a million small dictionaries would take
    half a gigabyte, and hold up the event loop.
    """
    known = (
        f"{{{','.join((_entry(token, value, rank), *_others(token, top_ids, top_values)))}}}"
        for token, value, rank, top_ids, top_values in zip(
            ids[1:], found[index], found.ranks[index], found.top_ids[index], found.top_logprobs[index], strict=True
        )
    )
    return f"[{','.join(('null', *known))}]"


def _others(given: int, top_ids: Sequence[int], values: Sequence[float]) -> Iterator[str]:
    """Write the most likely tokens of a position, but for the given one."""
    for rank, (token, value) in enumerate(zip(top_ids, values, strict=True), 1):
        if token != given:
            yield _entry(token, value, rank)


def _entry(token: int, value: float, rank: int) -> str:
    return f'"{token}":{{"logprob":{_bounded(value)!r},"rank":{rank},"decoded_token":null}}'


def _bounded(value: float) -> float:
    return max(float(value), LEAST_LOGPROB)


def _with(head: dict[str, Any], name: str, value: str) -> Response:
    """Return an object of JSON with one more value, which is JSON already."""
    return Response(f'{json.dumps(head)[:-1]},"{name}":{value}}}', media_type="application/json")


def _json(content: object) -> Response:
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")
