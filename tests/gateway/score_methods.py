"""Which methods of which clients the score and teacher shapes serve, and the requests that these clients send."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tangram import Client

IDS = [5, 17, 33, 200, 7]
MORE = [9, 4]
HI = [{"role": "user", "content": "hi"}]
TEXT = "<|user|>hi<|assistant|>ho"


@dataclass(frozen=True)
class Method:
    """One method of a client, and how it goes here.

    Where it has a path, `body` is what the client of that version sends there, `read` takes from the answer what the client takes, and
    `expected` is the same as our own client gives it. Without `read` the request is refused.
    """

    client: str
    version: str
    method: str
    path: str = ""
    body: Any = None
    read: Callable[[Any], Any] | None = None
    expected: Callable[[Client], Any] | None = None
    how: str = "works"

    @property
    def name(self) -> str:
        """Return what the test is called."""
        return f"{self.client} {self.method}".replace(" ", "-")


def given(answer: Any, sequences: tuple[list[int], ...] = (IDS, MORE)) -> Any:
    """Read vLLM's `prompt_logprobs` of every choice as TRL does: the log-prob of the given token at each position but the first."""
    return [
        [position[str(token)]["logprob"] for position, token in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)]
        for choice, ids in zip(answer["choices"], sequences, strict=True)
    ]


def by_rank(position: Any) -> list[tuple[int, float]]:
    """Return what a position holds, as TRL does: tokens and their log-probs, the most likely first."""
    return [(int(token), entry["logprob"]) for token, entry in sorted(position.items(), key=lambda item: item[1]["rank"])]


def most_likely(client: Client, top_k: int, *sequences: list[int]) -> list[list[list[tuple[int, float]]]]:
    """Return the most likely tokens of each position with their log-probs, as our own client gives them."""
    found = client.logprobs("teacher", sequences, top_k=top_k)
    return [
        [list(zip(ids, values, strict=True)) for ids, values in zip(*one, strict=True)]
        for one in zip(found.top_ids, found.top_logprobs, strict=True)
    ]


def _first_of_each(answer: Any) -> Any:
    """Read as prime-rl's `prefill_logprobs` does: the first entry of each position, 0.0 where there is none."""
    return [next(iter(entry.values()))["logprob"] if entry else 0.0 for entry in answer["prompt_logprobs"]]


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


def _of(pairs: list[tuple[str, str]], service: str = "judge") -> Callable[[Client], list[float]]:
    return lambda client: list(client.score(service, [{"prompt": prompt, "response": response} for prompt, response in pairs]))


def _whole(*texts: str) -> Callable[[Client], list[float]]:
    return lambda client: list(client.score("judge", [{"response": text} for text in texts]))


def _activated(logits: Callable[[Client], list[float]]) -> Callable[[Client], Any]:
    return lambda client: pytest.approx([sigmoid(logit) for logit in logits(client)], rel=1e-12)


def _teacher(*sequences: list[int]) -> Callable[[Client], list[list[float]]]:
    return lambda client: [list(values) for values in client.logprobs("teacher", sequences)]


TRL, PRIME, SLIME = ("trl", "1.16.0"), ("prime-rl", "2026-08-21"), ("slime", "2026-08-21")
OPENRLHF, VERL, VLLM, OPENAI = ("openrlhf", "0.11"), ("verl", "0.9.1"), ("vllm (HTTP)", "0.32"), ("openai (HTTP)", "2")

SCORED = {"model": "teacher", "prompt": [IDS, MORE], "max_tokens": 1, "temperature": 0.7, "prompt_logprobs": 1}
_SAMPLED = {"n": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16}
PREFILL = {
    "model": "teacher",
    "token_ids": IDS,
    "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1},
}
SGLANG = {
    "input_ids": IDS,
    "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, "skip_special_tokens": False},
    "return_logprob": True,
    "logprob_start_len": 0,
}
# What clients send

EIGHT, TOO_MANY = {**SCORED, "prompt_logprobs": 8}, {**SCORED, "prompt_logprobs": 129}
ONE = {**SCORED, "prompt": IDS}
GENERATED = {"model": "teacher", "prompt": [IDS], "return_token_ids": True, **_SAMPLED, "logprobs": 0}
CHATTED = {"model": "teacher", "messages": HI, "return_token_ids": True, **_SAMPLED, "logprobs": True, "top_logprobs": 0}
ROLLOUT = {**PREFILL, "sampling_params": {"max_tokens": 64, "temperature": 1.0}}
LABELLED = {"prompt": "1 + 1 =", "response": "2", "label": "2"}
SUMS = {"query": ["1 + 1 = 2", "1 + 1 = 3"], "prompts": ["1 + 1 =", "1 + 1 ="], "labels": ["2", None]}
NO_SUMS: dict[str, list[str]] = {"query": [], "prompts": [], "labels": []}
RM = {"model": "/models/rm", "input": TEXT}
EMBEDDED = {"model": "judge", "input": ["a", "b"], "encoding_format": "base64"}
POOLED = {"model": "judge", "input": "a"}
RANKED = {"model": "judge", "query": "q", "documents": ["a", "b", "c"], "top_n": 2}
COMPLETED = {"model": "teacher", "prompt": ["a", "b"], "n": 2, "max_tokens": 4, "temperature": 0, "seed": 3}
SYSTEM = {"role": "system", "content": "Be short."}
ASKED = [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}]
SAID = [SYSTEM, {"role": "user", "content": "2 + 3?"}]
ANSWERED = {"model": "teacher", "messages": ASKED, "temperature": 1.0, "seed": 3, "max_completion_tokens": 5}
NOT_KNOWN = {"stream": True, "tools": [{"type": "function"}], "logprobs": True, "top_p": 0.9, "logit_bias": {"5": 1}}

# What they read of the answer


def _part(*keys: Any) -> Callable[[Any], Any]:
    """Return what reads a part of an answer; `*` stands for each entry of a list."""

    def read(answer: Any, keys: tuple[Any, ...] = keys) -> Any:
        for place, key in enumerate(keys):
            if key == "*":
                return [read(one, keys[place + 1 :]) for one in answer]
            answer = answer[key]
        return answer

    return read


def _positions(answer: Any) -> list[Any]:
    """Return vLLM's `prompt_logprobs` of each choice, without the first position."""
    return [choice["prompt_logprobs"][1:] for choice in answer["choices"]]


def _eight_each(answer: Any) -> Any:
    return [[by_rank(entry)[:8] for entry in positions] for positions in _positions(answer)]


def _one_sorted(answer: Any) -> Any:
    return [sorted(by_rank(entry)) for entry in _positions(answer)[0]]


def _ranks_of_tokens(answer: Any) -> Any:
    return [[[(int(token), entry["rank"]) for token, entry in one.items()] for one in positions] for positions in _positions(answer)]


def _input_logprobs(answer: Any) -> Any:
    return [[item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]]]


def _input_tops(answer: Any) -> Any:
    return [[[(token, value) for value, token, _ in position] for position in answer["meta_info"]["input_top_logprobs"][1:]]]


def _rewards(answer: Any) -> Any:
    return answer["rewards"] if answer["scores"] == answer["rewards"] else None


def _unpacked(answer: Any) -> Any:
    return [struct.unpack("<f", base64.b64decode(row["embedding"]))[0] for row in answer["data"]]


def _best(answer: Any) -> Any:
    return [(row["document"]["text"], row["relevance_score"]) for row in answer["results"]]


# What it is by our own client


def _score(client: Client) -> Any:
    return _whole(TEXT)(client)[0]


def _is(expected: Any) -> Callable[[Client], Any]:
    return lambda _: expected


def _eight(*sequences: list[int]) -> Callable[[Client], Any]:
    return lambda client: most_likely(client, 8, *sequences)


def _eight_and_given(client: Client) -> Any:
    rows = zip(IDS[1:], client.logprobs("teacher", [IDS])[0], *most_likely(client, 8, IDS), strict=True)
    return [sorted({*top, (token, value)}) for token, value, top in rows]


def _zero_and_given(client: Client) -> Any:
    return [0.0, *client.logprobs("teacher", [IDS])[0]]


def _ranks(client: Client) -> Any:
    found = client.logprobs("teacher", (IDS, MORE), top_k=0).ranks
    return [[[(token, rank)] for token, rank in zip(ids[1:], ranks, strict=True)] for ids, ranks in zip((IDS, MORE), found, strict=True)]


def _best_two(client: Client) -> Any:
    logits = zip(_of([("q", text) for text in "abc"])(client), "abc", strict=True)
    return [(text, pytest.approx(sigmoid(logit))) for logit, text in sorted(logits, reverse=True)[:2]]


def _of_messages(client: Client) -> Any:
    return list(client.score("judge", [{"prompt": HI, "response": []}]))


def _nearly(client: Client) -> Any:
    return pytest.approx(_whole("a", "b")(client), rel=1e-6)


def _texts(client: Client) -> Any:
    return list(client.generate("teacher", ["a", "a", "b", "b"], max_tokens=4))


def _answer(client: Client) -> Any:
    return list(client.generate("teacher", [SAID], max_tokens=5, temperature=1.0, seed=3))


NO_WEIGHTS = "not served: no weights are sent to a service"
FEW = "refused: at most the 128 most likely tokens of a position are given"
NO_IDS = "refused: texts are continued, not token ids"
ROUTER = "works where the router's address is `tangram:TOKEN@HOST:PORT/services/NAME`"
NO_USAGE = "differs: no `usage`"
LOGIT = "differs: of a service that scores, a vector of one number, the logit; no `usage`"
STOPPED = "differs: no `usage`; `finish_reason` is null where no stop word ended the text"
AT_MOST = "differs: as completions.create; at most 1024 tokens unless told otherwise"

LOGPROBS, SCORE, REWARD, DISTIL = (
    "VLLMClient.get_sequence_logprobs",
    "async_distillation._score_with_teacher",
    "on_policy_distillation.reward_func",
    "RewardLoopWorker.compute_score_disrm",
)
HEALTH, COMPLETIONS, CHAT, GENERATE = "/services/teacher/health", "/v1/completions", "/v1/chat/completions", "/services/teacher/generate"

METHODS = (
    Method(*TRL, "VLLMClient.check_server", HEALTH, None, _part("status"), _is("ok")),
    Method(*TRL, "VLLMClient.__init__: /v1/models", "/services/teacher/v1/models", None, _part("data", "*", "id"), _is(["teacher"])),
    Method(*TRL, f"{LOGPROBS}(top_logprobs=1)", COMPLETIONS, SCORED, given, _teacher(IDS, MORE)),
    Method(*TRL, f"{LOGPROBS}(top_logprobs=8)", COMPLETIONS, EIGHT, _eight_each, _eight(IDS, MORE)),
    Method(*TRL, f"{LOGPROBS}(top_logprobs=129)", COMPLETIONS, TOO_MANY, how=FEW),
    Method(*TRL, f"{SCORE}(teacher_top_k=1)", "/services/teacher/v1/completions", ONE, lambda answer: given(answer, (IDS,)), _teacher(IDS)),
    Method(*TRL, f"{SCORE}(teacher_top_k=8)", COMPLETIONS, {**ONE, "prompt_logprobs": 8}, _one_sorted, _eight_and_given),
    Method(*TRL, "VLLMClient.generate", COMPLETIONS, GENERATED, how=NO_IDS),
    Method(*TRL, "VLLMClient.chat", CHAT, CHATTED, how="refused: the ids of texts are not known"),
    Method(*TRL, "VLLMClient.image_features", how="not served: services take no images"),
    Method(*TRL, "VLLMClient.init_communicator, update_named_param, update_model_params, reset_prefix_cache", how=NO_WEIGHTS),
    Method(*PRIME, "check_health", HEALTH, None, _part("status"), _is("ok")),
    Method(*PRIME, "maybe_check_has_model", "/v1/models", None, lambda answer: "teacher" in _part("data", "*", "id")(answer), _is(True)),
    Method(*PRIME, "prefill_logprobs", "/inference/v1/generate", PREFILL, _first_of_each, _zero_and_given),
    Method(*PRIME, "rollouts through renderers", "/inference/v1/generate", ROLLOUT, how=NO_IDS),
    Method(*PRIME, "update_weights, load_lora_adapter, init_nccl_broadcast", how=NO_WEIGHTS),
    Method(*SLIME, "rm_hub.remote_rm", "/rm/judge", LABELLED, lambda answer: [answer], _of([("1 + 1 =", "2")])),
    Method(*SLIME, REWARD, GENERATE, SGLANG, _input_logprobs, _teacher(IDS)),
    Method(*SLIME, f"{REWARD} with top_logprobs_num", GENERATE, {**SGLANG, "top_logprobs_num": 8}, _input_tops, _eight(IDS)),
    Method(*SLIME, f"{REWARD} with images", GENERATE, {**SGLANG, "image_data": ["aGk="]}, how="refused: services take no images"),
    Method(*OPENRLHF, "_fetch_rewards_via_http", "/reward/judge", SUMS, _rewards, _whole("1 + 1 = 2", "1 + 1 = 3")),
    Method(*OPENRLHF, "_fetch_rewards_via_http, no texts left for a server", "/reward/judge", NO_SUMS, _rewards, _is([])),
    Method(
        *VERL,
        f"{DISTIL} (vllm)",
        "/services/judge/classify",
        {**RM, "use_activation": False},
        _part("data", -1, "probs", -1),
        _score,
        ROUTER,
    ),
    Method(*VERL, f"{DISTIL} (sglang)", "/services/judge/v1/embeddings", RM, _part("data", -1, "embedding", -1), _score, ROUTER),
    Method(*OPENAI, "embeddings.create", "/v1/embeddings", EMBEDDED, _unpacked, _nearly, LOGIT),
    Method(
        *OPENAI,
        "embeddings.create(dimensions)",
        "/v1/embeddings",
        {**POOLED, "dimensions": 256},
        how="refused: services give one number for a text",
    ),
    Method(*VLLM, "/v1/completions prompt_logprobs=0", COMPLETIONS, {**SCORED, "prompt_logprobs": 0}, _ranks_of_tokens, _ranks),
    Method(
        *VLLM,
        "/classify",
        "/classify",
        {"model": "judge", "input": ["a", "b"]},
        _part("data", "*", "probs", 0),
        _activated(_whole("a", "b")),
        "differs: `label` is null, no `usage`",
    ),
    Method(
        *VLLM,
        "/classify with messages",
        "/classify",
        {"model": "judge", "messages": HI, "use_activation": False},
        _part("data", "*", "probs", 0),
        _of_messages,
    ),
    Method(*VLLM, "/classify with token ids", "/classify", {"model": "judge", "input": [IDS]}, how="refused: texts are scored"),
    Method(
        *VLLM,
        "/pooling",
        "/pooling",
        {**POOLED, "use_activation": False},
        _part("data", 0, "data"),
        _whole("a"),
        "differs: task classify only, no `usage`",
    ),
    Method(*VLLM, "/pooling of embeddings", "/pooling", {**POOLED, "task": "embed"}, how="refused: services score"),
    *(
        Method(
            *VLLM,
            f"{path} {first}/{second}",
            path,
            {"model": "judge", first: "q", second: ["a", "b"]},
            _part("data", "*", "score"),
            _activated(_of([("q", "a"), ("q", "b")])),
            NO_USAGE,
        )
        for path, first, second in (
            ("/score", "text_1", "text_2"),
            ("/v1/score", "queries", "documents"),
            ("/score", "queries", "items"),
            ("/score", "data_1", "data_2"),
        )
    ),
    *(Method(*VLLM, path, path, RANKED, _best, _best_two, NO_USAGE) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Method(*OPENAI, "completions.create", COMPLETIONS, COMPLETED, _part("choices", "*", "text"), _texts, STOPPED),
    Method(*OPENAI, "chat.completions.create", CHAT, ANSWERED, _part("choices", "*", "message", "content"), _answer, AT_MOST),
    *(
        Method(
            *OPENAI,
            f"chat.completions.create({name})",
            CHAT,
            {"model": "teacher", "messages": HI, name: value},
            how="refused: not known, or not done",
        )
        for name, value in NOT_KNOWN.items()
    ),
)


def score_calls(http: httpx.Client, client: Client, judge: str, teacher: str) -> dict[str, Callable[[], Any]]:
    """Return a call of each shape that gives scores, by shape; what it returns is what a trainer reads of the answer."""

    def post(path: str, body: Any) -> Any:
        answer = http.post(path, json=body)
        if answer.status_code != 200:
            raise Refused(answer)
        found = answer.json()
        return {key: found[key] for key in ("scores", "rewards", "data", "choices") if key in found} if isinstance(found, dict) else found

    completion = {"model": teacher, "prompt": [[1, 2, 3]], "max_tokens": 1, "prompt_logprobs": 0}
    return {
        "client": lambda: list(client.score(judge, [{"prompt": "p", "response": "r"}])),
        "native": lambda: post("/api/v1/score", {"service": judge, "items": [{"prompt": "p", "response": "r"}]}),
        "rewards: slime": lambda: post(f"/rm/{judge}", {"prompt": "p", "response": "r"}),
        "rewards: openrlhf": lambda: post(f"/reward/{judge}", {"query": ["p"], "prompts": ["p"], "labels": [""]}),
        "scores: classify": lambda: post("/classify", {"model": judge, "input": "p"}),
        "scores: score": lambda: post("/score", {"model": judge, "text_1": "p", "text_2": "r"}),
        "teachers: completions": lambda: post("/v1/completions", completion),
    }


class Refused(Exception):
    """Raised for an answer that is none."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(answer.text)
        self.answer = answer
