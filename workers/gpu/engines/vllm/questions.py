"""The requests of each kind of question, and how their answers are read. Pure: ids in, JSON out, JSON in, numbers out.

A question about many inputs becomes several requests, so that none is long and a server that works continuously always
has the next one waiting. What an answer lacks is an error and never a number that was made up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from workers.gpu.engines import canary
from workers.gpu.engines.abstract import Task
from workers.gpu.engines.canary import Answer
from workers.gpu.errors import CallFailed
from workers.gpu.items import Sampling, TokenLogprobs

Request = tuple[str, str, object]
Pooling = Literal["classify", "reward"]

MOST_TOKENS = 32_768
"""Tokens in one request; an input that is longer is a request of its own."""

MOST_ENTRIES = 1 << 18
"""Log-probs in the answer to one request, about 60 bytes each; an input that has more is a request of its own."""

_SEEDS = 1 << 63


def portions(inputs: Sequence[list[int]], most: int, most_tokens: int = MOST_TOKENS) -> list[list[list[int]]]:
    """Cut inputs, in their order, into portions of at most `most` inputs and `most_tokens` tokens."""
    cut: list[list[list[int]]] = []
    tokens = 0
    for ids in inputs:
        if not cut or len(cut[-1]) == most or tokens + len(ids) > most_tokens:
            cut.append([])
            tokens = 0
        cut[-1].append(ids)
        tokens += len(ids)
    return cut


def score_request(model: str, inputs: list[list[int]], pooling: Pooling = "classify") -> Request:
    """Ask for the raw logits of inputs; a reward model gives one for each token."""
    body: dict[str, object] = {"model": model, "input": inputs, "use_activation": False}
    if pooling == "classify":
        return "POST", "/classify", body
    return "POST", "/pooling", {**body, "task": "token_classify", "encoding_format": "float"}


def read_scores(answer: Any, count: int, first: int, pooling: Pooling = "classify") -> list[float]:
    """Return the logits of a request's inputs, the first of which is the call's item `first`. Raises `CallFailed`."""
    with_index = sorted(_rows(answer, "data", count), key=lambda row: row["index"])
    scores = []
    for place, row in enumerate(with_index):
        # What precedes the last token is the reward of a part of the response.
        given = row["probs"] if pooling == "classify" else (row["data"] or [None])[-1]
        if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], int | float) or not math.isfinite(given[0]):
            raise CallFailed(f"items[{first + place}]: the model's score is {given}")
        scores.append(float(given[0]))
    return scores


def logprobs_request(model: str, inputs: list[list[int]], top_k: int = 0, **more: object) -> Request:
    """Ask for the log-probs of the inputs' own and most likely tokens, with `more` fields; vLLM always generates a token too."""
    body = {"model": model, "prompt": inputs, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top_k, **more}
    return "POST", "/v1/completions", body


def read_logprobs(answer: Any, inputs: list[list[int]], first: int, top_k: int | None = None) -> list[TokenLogprobs]:
    """Return for each of a request's inputs the log-probs of all its ids but the first. Raises `CallFailed`."""
    choices = sorted(_rows(answer, "choices", len(inputs)), key=lambda row: row["index"])
    out = []
    for place, (ids, choice) in enumerate(zip(inputs, choices, strict=True)):
        given = choice["prompt_logprobs"]
        if not isinstance(given, list) or len(given) != len(ids):
            raise CallFailed(f"sequences[{first + place}]: the server gives no log-prob for each of {len(ids)} tokens")
        values = [_logprob(position, token) for position, token in zip(given[1:], ids[1:], strict=True)]
        if any(value is None or math.isnan(value) for value in values):
            raise CallFailed(f"sequences[{first + place}]: the model's log-probs are not numbers")
        said = TokenLogprobs([value for value in values if value is not None])
        if top_k is not None:
            try:
                _rank(said, given[1:], ids[1:], top_k)
            except (LookupError, TypeError, ValueError) as error:
                raise CallFailed(f"sequences[{first + place}]: the server does not give ranks and {top_k} most likely tokens") from error
        out.append(said)
    return out


def canary_request(model: str, task: Task, ids: list[int], pooling: Pooling = "classify") -> Request:
    """Ask a question of the canary; neither log-probs of a prompt nor scores are answered from the prefix cache."""
    if task == "score":
        return score_request(model, [ids], pooling)
    return logprobs_request(model, [ids], max_tokens=canary.NEW_TOKENS, ignore_eos=True, logprobs=0, return_token_ids=True)


def read_canary(answer: Any, task: Task, ids: list[int], pooling: Pooling = "classify") -> Answer:
    """Return the answer to a question of the canary. Raises `CallFailed`."""
    if task == "score":
        return Answer(tuple(read_scores(answer, 1, 0, pooling)))
    (said,) = read_logprobs(answer, [ids], 0)
    new, found = _generated(answer, 0)
    if not len(found) == len(new) == canary.NEW_TOKENS:
        raise CallFailed(f"the server gives no log-prob for each of {canary.NEW_TOKENS} tokens that it was to generate")
    return Answer((*said.logprobs, *(math.nan if value is None else float(value) for value in found)), tuple(new))


def generate_request(model: str, prompt: list[int], sampling: Sampling, index: int, ends: frozenset[int]) -> Request:
    """Ask for the continuation of the call's prompt `index`, whose draws have a seed of their own."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": (sampling.seed + index) % _SEEDS,
        "stop_token_ids": sorted(ends),
        "return_token_ids": True,
        "logprobs": 0,  # which tell whether the tokens were chosen from numbers
    }
    return "POST", "/v1/completions", body


def read_generated(answer: Any, index: int, ends: frozenset[int]) -> list[int]:
    """Return the ids that continue a prompt, an end token left out. Raises `CallFailed`."""
    ids, logprobs = _generated(answer, index)
    if len(logprobs) != len(ids) or any(value is None or not math.isfinite(value) for value in logprobs):
        raise CallFailed(f"prompts[{index}]: the log-probs of the tokens that the model chose are not numbers")
    return ids[:-1] if ids and ids[-1] in ends else ids


def _generated(answer: Any, index: int) -> tuple[list[int], list[float | None]]:
    """Return the ids that the server chose, and what it says of their log-probs."""
    row = _rows(answer, "choices", 1)[0]
    ids, said = row.get("token_ids"), row.get("logprobs")
    if not isinstance(ids, list):
        raise CallFailed(f"prompts[{index}]: the server gives no token ids: it takes a vLLM that knows `return_token_ids`")
    values = said.get("token_logprobs") if isinstance(said, dict) else None
    return ids, values if isinstance(values, list) else []


def _rows(answer: Any, key: str, count: int) -> list[dict[str, Any]]:
    rows = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(rows, list) or len(rows) != count:
        raise CallFailed(f"the server gives {len(rows) if isinstance(rows, list) else 'no'} answers to {count} inputs")
    return rows


def _rank(said: TokenLogprobs, positions: Sequence[dict[str, Any]], ids: Sequence[int], top_k: int) -> None:
    """Read ranks and the most likely ids, of which vLLM gives no more than asked for, and the given id besides.

    vLLM counts ids that are as likely as the given one, too. Where the given one is among the most likely, they are not counted here.
    """
    for position, token, own in zip(positions, ids, said.logprobs, strict=True):
        ranked = sorted((int(entry["rank"]), int(key), float(entry["logprob"])) for key, entry in position.items())
        top = [(key, value) for rank, key, value in ranked if rank <= top_k]
        if len(top) != top_k or any(math.isnan(value) for _, value in top):
            raise ValueError("the most likely tokens are not all there")
        among = any(key == token for key, _ in top)
        said.ranks.append(1 + sum(value > own for _, value in top) if among else int(position[str(token)]["rank"]))
        said.top_ids.extend(key for key, _ in top)
        said.top_logprobs.extend(value for _, value in top)


def _logprob(position: Any, token: int) -> float | None:
    entry = position.get(str(token)) if isinstance(position, dict) else None
    value = entry.get("logprob") if isinstance(entry, dict) else None
    return float(value) if isinstance(value, int | float) else None
