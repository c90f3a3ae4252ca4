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


@dataclass(frozen=True, kw_only=True)
class Method:
    """One method of a client, and how it goes here.

    Where it has a path, `body` is what the client of that version sends there, `read` takes from the answer what the client takes, and
    `expected` is the same as our own client gives it. Without `read` the request is refused.
    """

    client: str
    version: str
    method: str
    how: str = "works"
    path: str = ""
    body: Any = None
    read: Callable[[Any], Any] | None = None
    expected: Callable[[Client], Any] | None = None

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


TRL, PRIME, SLIME, OPENRLHF, VERL = (
    {"client": "trl", "version": "1.16.0"},
    {"client": "prime-rl", "version": "2026-08-21"},
    {"client": "slime", "version": "2026-08-21"},
    {"client": "openrlhf", "version": "0.11"},
    {"client": "verl", "version": "0.9.1"},
)
VLLM, OPENAI = {"client": "vllm (HTTP)", "version": "0.32"}, {"client": "openai (HTTP)", "version": "2"}

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
_NO_WEIGHTS = "not served: no weights are sent to a service"
_TOO_MANY = "refused: at most the 128 most likely tokens of a position are given"
_NO_IDS = "refused: texts are continued, not token ids"

_NOT_DONE: tuple[tuple[str, Any], ...] = (
    ("stream", True),
    ("tools", [{"type": "function"}]),
    ("logprobs", True),
    ("top_p", 0.9),
    ("logit_bias", {"5": 1}),
)

METHODS = (
    Method(
        **TRL,
        method="VLLMClient.check_server",
        path="/services/teacher/health",
        read=lambda answer: answer["status"],
        expected=lambda _: "ok",
    ),
    Method(
        **TRL,
        method="VLLMClient.__init__: /v1/models",
        path="/services/teacher/v1/models",
        read=lambda answer: [model["id"] for model in answer["data"]],
        expected=lambda _: ["teacher"],
    ),
    Method(
        **TRL,
        method="VLLMClient.get_sequence_logprobs(top_logprobs=1)",
        path="/v1/completions",
        body=SCORED,
        read=given,
        expected=_teacher(IDS, MORE),
    ),
    Method(
        **TRL,
        method="VLLMClient.get_sequence_logprobs(top_logprobs=8)",
        path="/v1/completions",
        body={**SCORED, "prompt_logprobs": 8},
        read=lambda answer: [[by_rank(entry)[:8] for entry in choice["prompt_logprobs"][1:]] for choice in answer["choices"]],
        expected=lambda client: most_likely(client, 8, IDS, MORE),
    ),
    Method(
        **TRL,
        method="VLLMClient.get_sequence_logprobs(top_logprobs=129)",
        how=_TOO_MANY,
        path="/v1/completions",
        body={**SCORED, "prompt_logprobs": 129},
    ),
    Method(
        **TRL,
        method="async_distillation._score_with_teacher(teacher_top_k=1)",
        path="/services/teacher/v1/completions",
        body={**SCORED, "model": "teacher", "prompt": IDS},
        read=lambda answer: [
            [entry[str(token)]["logprob"] for entry, token in zip(answer["choices"][0]["prompt_logprobs"][1:], IDS[1:], strict=True)]
        ],
        expected=_teacher(IDS),
    ),
    Method(
        **TRL,
        method="async_distillation._score_with_teacher(teacher_top_k=8)",
        path="/v1/completions",
        body={**SCORED, "prompt": IDS, "prompt_logprobs": 8},
        read=lambda answer: [sorted(by_rank(entry)) for entry in answer["choices"][0]["prompt_logprobs"][1:]],
        expected=lambda client: [
            sorted({*top, (token, value)})
            for token, value, top in zip(IDS[1:], client.logprobs("teacher", [IDS])[0], *most_likely(client, 8, IDS), strict=True)
        ],
    ),
    Method(
        **TRL,
        method="VLLMClient.generate",
        how=_NO_IDS,
        path="/v1/completions",
        body={"model": "teacher", "prompt": [IDS], "return_token_ids": True, "return_tokens_as_token_ids": True, **_SAMPLED, "logprobs": 0},
    ),
    Method(
        **TRL,
        method="VLLMClient.chat",
        how="refused: the ids of texts are not known",
        path="/v1/chat/completions",
        body={
            **{"model": "teacher", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 0},
            **{**_SAMPLED, "return_token_ids": True, "return_tokens_as_token_ids": True},
        },
    ),
    Method(**TRL, method="VLLMClient.image_features", how="not served: services take no images"),
    Method(**TRL, method="VLLMClient.init_communicator, update_named_param, update_model_params, reset_prefix_cache", how=_NO_WEIGHTS),
    Method(
        **PRIME,
        method="check_health",
        path="/services/teacher/health",
        read=lambda answer: answer["status"],
        expected=lambda _: "ok",
    ),
    Method(
        **PRIME,
        method="maybe_check_has_model",
        path="/v1/models",
        read=lambda answer: "teacher" in [model["id"] for model in answer["data"]],
        expected=lambda _: True,
    ),
    Method(
        **PRIME,
        method="prefill_logprobs",
        path="/inference/v1/generate",
        body=PREFILL,
        read=_first_of_each,
        expected=lambda client: [0.0, *client.logprobs("teacher", [IDS])[0]],
    ),
    Method(
        **PRIME,
        method="rollouts through renderers",
        how=_NO_IDS,
        path="/inference/v1/generate",
        body={**PREFILL, "sampling_params": {"max_tokens": 64, "temperature": 1.0}},
    ),
    Method(**PRIME, method="update_weights, load_lora_adapter, init_nccl_broadcast", how=_NO_WEIGHTS),
    Method(
        **SLIME,
        method="rm_hub.remote_rm",
        path="/rm/judge",
        body={"prompt": "1 + 1 =", "response": "2", "label": "2"},
        read=lambda answer: [answer],
        expected=_of([("1 + 1 =", "2")]),
    ),
    Method(
        **SLIME,
        method="on_policy_distillation.reward_func",
        path="/services/teacher/generate",
        body=SGLANG,
        read=lambda answer: [[item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]]],
        expected=_teacher(IDS),
    ),
    Method(
        **SLIME,
        method="on_policy_distillation.reward_func with top_logprobs_num",
        path="/services/teacher/generate",
        body={**SGLANG, "top_logprobs_num": 8},
        read=lambda answer: [
            [[(token, value) for value, token, _ in position] for position in answer["meta_info"]["input_top_logprobs"][1:]],
        ],
        expected=lambda client: most_likely(client, 8, IDS),
    ),
    Method(
        **SLIME,
        method="on_policy_distillation.reward_func with images",
        how="refused: services take no images",
        path="/services/teacher/generate",
        body={**SGLANG, "image_data": ["aGk="]},
    ),
    Method(
        **OPENRLHF,
        method="_fetch_rewards_via_http",
        path="/reward/judge",
        body={"query": ["1 + 1 = 2", "1 + 1 = 3"], "prompts": ["1 + 1 =", "1 + 1 ="], "labels": ["2", None]},
        read=lambda answer: answer["rewards"] if answer["scores"] == answer["rewards"] else None,
        expected=_whole("1 + 1 = 2", "1 + 1 = 3"),
    ),
    Method(
        **OPENRLHF,
        method="_fetch_rewards_via_http, no texts left for a server",
        path="/reward/judge",
        body={"query": [], "prompts": [], "labels": []},
        read=lambda answer: answer,
        expected=lambda _: {"rewards": [], "scores": [], "extra_logs": {}},
    ),
    Method(
        **VERL,
        method="RewardLoopWorker.compute_score_disrm (vllm)",
        how="works where the router's address is `tangram:TOKEN@HOST:PORT/services/NAME`",
        path="/services/judge/classify",
        body={"model": "/models/rm", "input": "<|user|>hi<|assistant|>ho", "use_activation": False},
        read=lambda answer: [answer["data"][-1]["probs"][-1]],
        expected=_whole("<|user|>hi<|assistant|>ho"),
    ),
    Method(
        **VERL,
        method="RewardLoopWorker.compute_score_disrm (sglang)",
        how="works where the router's address is `tangram:TOKEN@HOST:PORT/services/NAME`",
        path="/services/judge/v1/embeddings",
        body={"model": "/models/rm", "input": "<|user|>hi<|assistant|>ho"},
        read=lambda answer: [answer["data"][-1]["embedding"][-1]],
        expected=_whole("<|user|>hi<|assistant|>ho"),
    ),
    Method(
        **OPENAI,
        method="embeddings.create",
        how="differs: of a service that scores, a vector of one number, the logit; no `usage`",
        path="/v1/embeddings",
        body={"model": "judge", "input": ["a", "b"], "encoding_format": "base64"},
        read=lambda answer: [struct.unpack("<f", base64.b64decode(row["embedding"]))[0] for row in answer["data"]],
        expected=lambda client: pytest.approx(_whole("a", "b")(client), rel=1e-6),
    ),
    Method(
        **OPENAI,
        method="embeddings.create(dimensions)",
        how="refused: services give one number for a text",
        path="/v1/embeddings",
        body={"model": "judge", "input": "a", "dimensions": 256},
    ),
    Method(
        **VLLM,
        method="/v1/completions prompt_logprobs=0",
        path="/v1/completions",
        body={**SCORED, "prompt_logprobs": 0},
        read=lambda answer: [
            [[(int(token), entry["rank"]) for token, entry in position.items()] for position in choice["prompt_logprobs"][1:]]
            for choice in answer["choices"]
        ],
        expected=lambda client: [
            [[(token, rank)] for token, rank in zip(ids[1:], ranks, strict=True)]
            for ids, ranks in zip((IDS, MORE), client.logprobs("teacher", (IDS, MORE), top_k=0).ranks, strict=True)
        ],
    ),
    Method(
        **VLLM,
        method="/classify",
        how="differs: `label` is null, no `usage`",
        path="/classify",
        body={"model": "judge", "input": ["a", "b"]},
        read=lambda answer: [row["probs"][0] for row in answer["data"]],
        expected=_activated(_whole("a", "b")),
    ),
    Method(
        **VLLM,
        method="/classify with messages",
        path="/classify",
        body={"model": "judge", "messages": [{"role": "user", "content": "hi"}], "use_activation": False},
        read=lambda answer: [row["probs"][0] for row in answer["data"]],
        expected=lambda client: list(client.score("judge", [{"prompt": [{"role": "user", "content": "hi"}], "response": []}])),
    ),
    Method(
        **VLLM,
        method="/classify with token ids",
        how="refused: texts are scored",
        path="/classify",
        body={"model": "judge", "input": [IDS]},
    ),
    Method(
        **VLLM,
        method="/pooling",
        how="differs: task classify only, no `usage`",
        path="/pooling",
        body={"model": "judge", "input": "a", "use_activation": False},
        read=lambda answer: answer["data"][0]["data"],
        expected=_whole("a"),
    ),
    Method(
        **VLLM,
        method="/pooling of embeddings",
        how="refused: services score",
        path="/pooling",
        body={"model": "judge", "input": "a", "task": "embed"},
    ),
    *(
        Method(
            **VLLM,
            method=f"{path} {'/'.join(names)}",
            how="differs: no `usage`",
            path=path,
            body={"model": "judge", **dict(zip(names, ("q", ["a", "b"]), strict=True))},
            read=lambda answer: [row["score"] for row in answer["data"]],
            expected=_activated(_of([("q", "a"), ("q", "b")])),
        )
        for path, names in (
            ("/score", ("text_1", "text_2")),
            ("/v1/score", ("queries", "documents")),
            ("/score", ("queries", "items")),
            ("/score", ("data_1", "data_2")),
        )
    ),
    *(
        Method(
            **VLLM,
            method=path,
            how="differs: no `usage`",
            path=path,
            body={"model": "judge", "query": "q", "documents": ["a", "b", "c"], "top_n": 2},
            read=lambda answer: [(row["document"]["text"], row["relevance_score"]) for row in answer["results"]],
            expected=lambda client: [
                (text, pytest.approx(sigmoid(logit)))
                for logit, text in sorted(zip(_of([("q", one) for one in "abc"])(client), "abc", strict=True), reverse=True)[:2]
            ],
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Method(
        **OPENAI,
        method="completions.create",
        how="differs: no `usage`; `finish_reason` is null where no stop word ended the text",
        path="/v1/completions",
        body={"model": "teacher", "prompt": ["a", "b"], "n": 2, "max_tokens": 4, "temperature": 0, "seed": 3},
        read=lambda answer: [choice["text"] for choice in answer["choices"]],
        expected=lambda client: list(client.generate("teacher", ["a", "a", "b", "b"], max_tokens=4)),
    ),
    Method(
        **OPENAI,
        method="chat.completions.create",
        how="differs: as completions.create; at most 1024 tokens unless told otherwise",
        path="/v1/chat/completions",
        body={
            "model": "teacher",
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}],
            **{"temperature": 1.0, "seed": 3, "max_completion_tokens": 5},
        },
        read=lambda answer: [choice["message"]["content"] for choice in answer["choices"]],
        expected=lambda client: list(
            client.generate(
                "teacher",
                [[{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 3?"}]],
                max_tokens=5,
                temperature=1.0,
                seed=3,
            )
        ),
    ),
    *(
        Method(
            **OPENAI,
            method=f"chat.completions.create({name})",
            how="refused: not known, or not done",
            path="/v1/chat/completions",
            body={"model": "teacher", "messages": [{"role": "user", "content": "hi"}], name: value},
        )
        for name, value in _NOT_DONE
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
