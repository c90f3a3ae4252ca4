"""The score and teacher shapes: recorded requests of the clients, TRL's own client, failures, a full queue.

Recorded requests are those of `score_methods.METHODS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from tangram import Action, ActionError, Client, Handle
from tangram import calls as words
from tests.clients.rows import shows
from tests.gateway.conftest import QUEUE_LIMIT, Served
from tests.gateway.score_methods import IDS, METHODS, MORE, PREFILL, SCORED, SGLANG, Method, Refused, score_calls

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    """Return our own client, whose answers are the expected ones."""
    with served.live.client("tests") as client:
        yield client


def _held(job: str) -> Action:
    """Return an action that holds the service `slow` for a minute."""
    action = words.score(job, "slow", [{"prompt": "p", "response": "r"}], {})
    return replace(action, arguments={**action.arguments, "work_s": 60.0})


def _status(served: Served, handle: Handle[Any]) -> str:
    """Return the status of an action; nothing before the scheduler knows it."""
    return next((str(row[0]) for row in served.live.rows(f"SELECT status FROM actions WHERE id = '{handle.id}'")), "")


@pytest.mark.parametrize("method", [method for method in METHODS if method.path], ids=lambda method: method.name)
def test_recorded_requests_are_answered_as_their_client_reads_it(method: Method, http: httpx.Client, client: Client) -> None:
    answer = http.get(method.path) if method.body is None else http.post(method.path, json=method.body)
    if method.read is None or method.expected is None:
        assert method.how.startswith("refused: ")
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"], answer.text
    else:
        assert method.how.startswith(("works", "differs: "))
        assert answer.status_code == 200, answer.text
        assert method.read(answer.json()) == method.expected(client)


def test_a_position_has_the_given_token_first_and_then_the_most_likely_ones(http: httpx.Client, client: Client) -> None:
    found = client.logprobs("teacher", [IDS], top_k=4)
    (choice,) = http.post("/v1/completions", json={**SCORED, "prompt": IDS, "prompt_logprobs": 4}).json()["choices"]
    first, *positions = choice["prompt_logprobs"]
    assert first is None and len(positions) == len(IDS) - 1
    for token, rank, top, position in zip(IDS[1:], found.ranks[0], found.top_ids[0], positions, strict=True):
        assert list(position) == [str(one) for one in (token, *(one for one in top if one != token))]
        ranks = {int(one): entry["rank"] for one, entry in position.items()}
        assert ranks == {**{one: place for place, one in enumerate(top, 1)}, token: rank}
        assert all(entry["decoded_token"] is None for entry in position.values())


def test_each_call_is_one_action_with_its_id_in_the_answer(served: Served) -> None:
    with served.http("counted") as http:
        answer = http.post("/score", json={"model": "judge", "text_1": "q", "text_2": ["a", "b", "c"], "queries": None}).json()
    rows = served.live.rows("SELECT id, kind, service FROM actions WHERE job = 'counted'")
    assert rows == [(answer["id"].removeprefix("score-"), "gpu.score", "judge")]


def test_a_text_ends_before_the_first_word_that_stops_it(http: httpx.Client, client: Client) -> None:
    (whole,) = client.generate("teacher", ["a"], max_tokens=8)
    stops = [whole.split()[5], whole.split()[3]]
    body = {"model": "teacher", "prompt": "a", "max_tokens": 8, "temperature": 0, "stop": stops}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[: min(map(whole.find, stops))], "stop")


def test_texts_without_a_seed_differ_from_call_to_call(http: httpx.Client) -> None:
    texts = {http.post("/v1/completions", json={"model": "teacher", "prompt": "a"}).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 4


NOT_SERVED: dict[str, tuple[tuple[str, Any], ...]] = {
    "trl-VLLMClient.image_features": (("/image_features/", {"images": ["aGk="]}),),
    "trl-VLLMClient.init_communicator,-update_named_param,-update_model_params,-reset_prefix_cache": (
        ("/init_communicator/", {"host": "0.0.0.0", "port": 51216, "world_size": 2, "client_device_uuid": "0"}),
        ("/update_named_param/", {"name": "w", "dtype": "torch.float32", "shape": [1]}),
        ("/reset_prefix_cache/", {}),
        ("/reset_prefix_cache", {}),
    ),
    "prime-rl-update_weights,-load_lora_adapter,-init_nccl_broadcast": (
        ("/update_weights", {"weight_dir": "/weights/step-1"}),
        ("/load_lora_adapter", {"lora_name": "step-1", "lora_path": "/weights/step-1"}),
        ("/init_broadcaster", {"host": "0.0.0.0", "port": 29500}),
    ),
}
"""What clients send to paths that are not served, by the name of the row: paths and bodies."""


@pytest.mark.parametrize("name", [method.name for method in METHODS if not method.path])
def test_a_path_that_is_not_served_is_not_found(http: httpx.Client, name: str) -> None:
    for path, body in NOT_SERVED[name]:
        for prefix in ("", "/services/judge"):
            answer = http.post(prefix + path, json=body)
            assert answer.status_code == 404, (path, answer.text)


@shows("sandbox-fusion", "get_prompts, submit, list_datasets", "not served: data sets and their scoring are the caller's")
@pytest.mark.parametrize("path", ["/list_datasets", "/list_ids", "/get_prompts", "/get_prompt_by_id", "/submit", "/get_metrics"])
def test_data_sets_of_sandbox_fusion_are_not_found(http: httpx.Client, path: str) -> None:
    assert http.post(path, json={"dataset": "any", "config": {}}).status_code == 404


LONG = [{"role": "user", "content": "a" * 100_000}]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/classify", {"input": "a"}, "broken or judge or slow"),
        ("/classify", {"model": "nobody", "input": "a"}, "nobody"),
        ("/classify", {"model": "teacher", "input": "a"}, "teacher is a service of task 'logprobs'"),
        ("/classify", {"model": "judge"}, "give either input or messages"),
        ("/score", {"model": "judge", "text_1": "q", "documents": ["a"]}, "text_1 and text_2"),
        ("/score", {"model": "judge", "text_1": "q", "text_2": None}, "text_1 and text_2"),
        ("/score", {"model": "judge", "text_1": ["q", "r"], "text_2": ["a"]}, "2 texts cannot be paired with 1"),
        ("/v1/completions", {"model": "teacher", "prompt": "a", "prompt_logprobs": 1}, "token ids"),
        ("/v1/completions", {"model": "teacher", "prompt": [[5]], "prompt_logprobs": -1}, "prompt_logprobs: must be from 0 to 128, not -1"),
        ("/v1/completions", {"model": "teacher", "prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"model": "teacher", "prompt": []}, "prompt"),
        ("/v1/completions", {"model": "teacher", "prompt": ["a"] * 9, "n": 1024}, "n: 9 prompts with 1024 texts each are more than the"),
        ("/v1/completions", {"model": "teacher", "prompt": "a" * 100_000, "n": 1024}, "n: 1024 times these prompts is more than "),
        ("/v1/chat/completions", {"model": "teacher", "messages": LONG, "n": 1024}, "n: 1024 times"),
        ("/v1/embeddings", {"model": "teacher", "input": "a"}, "teacher is a service of task 'logprobs'"),
        ("/v1/embeddings", {"model": "judge", "input": [5, 17]}, "input"),
        ("/generate", {**SGLANG, "model": "teacher", "top_logprobs_num": 129}, "top_logprobs_num"),
    ],
)
def test_what_is_wrong_is_refused_in_one_line(http: httpx.Client, path: str, body: dict[str, Any], says: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert says in message and "\n" not in message


def test_a_label_may_have_any_form(http: httpx.Client) -> None:
    body = b'{"prompt": "p", "response": "r", "label": ' + b"[" * 900 + b"]" * 900 + b"}"
    answer = http.post("/rm/judge", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200 and isinstance(answer.json(), float), answer.text


def test_an_engine_that_fails_gives_no_score_in_any_shape(served: Served) -> None:
    live, before, earlier = served.live, served.failures(), Counter(served.infra_failed("engine_failed"))
    with served.http() as http, live.client("scores") as client:
        shapes: Counter[str] = Counter()
        for name, call in score_calls(http, client, "broken", "broken-teacher").items():
            with pytest.raises((ActionError, Refused)) as caught:
                call()
            # And it is told whose fault that is
            if isinstance(caught.value, ActionError):
                assert (caught.value.cause, caught.value.fault) == ("engine_failed", "infrastructure")
                continue
            answer = caught.value.answer
            assert (answer.status_code, set(answer.json())) == (502, {"error"}), name
            said = answer.json()["error"]
            assert "infra" in (said.get("type"), said.get("kind")), name
            shapes[name.partition(":")[0]] += 1
        assert Counter(served.infra_failed("engine_failed")) - earlier == shapes
        live.until(lambda: served.failures() - before == {"engine_failed": 1 + shapes.total()})


def test_a_full_queue_is_answered_503_everywhere(served: Served) -> None:
    with served.live.client("full") as full, served.http("full") as http:
        # Given an action that holds the service, and as many behind it as may wait
        held = _held("full")
        handles = [full.submit(held)]
        served.live.until(lambda: _status(served, handles[0]) == "running")
        handles += [full.submit(held) for _ in range(QUEUE_LIMIT)]
        waiting = "SELECT count(*) FROM actions WHERE job = 'full' AND status = 'waiting'"
        served.live.until(lambda: served.live.rows(waiting) == [(QUEUE_LIMIT,)])
        try:
            for path, body in (
                ("/v1/completions", SCORED),
                ("/inference/v1/generate", PREFILL),
                ("/services/teacher/generate", SGLANG),
                ("/v1/chat/completions", {"model": "teacher", "messages": [{"role": "user", "content": "hi"}]}),
                ("/classify", {"model": "judge", "input": "a"}),
                ("/rm/judge", {"prompt": "p", "response": "r"}),
                ("/reward/judge", {"query": ["p"]}),
            ):
                answer = http.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overload"), answer.text
                assert int(answer.headers["Retry-After"]) > 0
        finally:
            for handle in handles:
                handle.cancel()


@pytest.mark.parametrize(
    ("path", "body"), [("/rm/slow", {"prompt": "p", "response": "r", "label": None}), ("/reward/slow", {"query": ["text"]})]
)
def test_a_reward_that_takes_long_keeps_its_place(served: Served, client: Client, path: str, body: dict[str, Any]) -> None:
    job = path.strip("/").replace("/", "-")
    holder = client.submit(_held("tests"))
    served.live.until(lambda: _status(served, holder) == "running")
    with served.http(job) as http:
        # Given a service that is busy, the caller is asked to come again, each time
        for _ in range(2):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "still_running"), answer.text
        holder.cancel()
        while (answer := http.post(path, json=body)).status_code == 503:
            pass
        rewards = answer.json()
    assert isinstance(rewards, float) or len(rewards["rewards"]) == 1
    assert served.live.rows(f"SELECT count(*) FROM actions WHERE job = '{job}'") == [(1,)]


_TRL = """
import asyncio, json, sys
from collections import Counter
import aiohttp
from accelerate import PartialState
from trl.generation import vllm_client
from trl.experimental.async_distillation.async_rollout_worker import _AsyncRolloutLoop
PartialState()  # its logger wants it
url, sequences = sys.argv[1], json.loads(sys.argv[2])
vllm_client.is_vllm_available = lambda: True  # its own guard: the constructor refuses where vLLM is not installed
client = vllm_client.VLLMClient(base_url=url)
whole = client.get_sequence_logprobs(sequences, [1] * len(sequences), top_logprobs=1)
chunked = client.get_sequence_logprobs(sequences, [1] * len(sequences), top_logprobs=1, chunk_size=1)
eight = client.get_sequence_logprobs(sequences, [1] * len(sequences), top_logprobs=8)

async def worker(top_k):
    loop = object.__new__(_AsyncRolloutLoop)
    loop.teacher_server_urls, loop.teacher_model_names = {"default": url}, {}
    loop.request_timeout, loop.teacher_top_k, loop.teacher_temperature, loop._counters = 60, top_k, 1.0, Counter()
    async with aiohttp.ClientSession() as loop.session:
        await loop._resolve_teacher_model_names()
        ids = sequences[0]
        return await loop._score_with_teacher(ids[:1], ids[1:], url, loop.teacher_model_names["default"])

try:
    client.get_sequence_logprobs(sequences, [1] * len(sequences), top_logprobs=129)
except Exception as error:
    refused = str(error)
print(json.dumps([client.model, whole, chunked, eight, asyncio.run(worker(1)), asyncio.run(worker(8)), refused]))
"""


def test_trls_own_client_reads_a_teacher(served: Served, client: Client) -> None:
    python = os.environ.get("TANGRAM_TEST_TRL_PYTHON") or (sys.executable if find_spec("trl") else None)
    if python is None:
        pytest.skip("TRL is not installed: TANGRAM_TEST_TRL_PYTHON may name an interpreter that has it")
    url = served.url.replace("://", f"://tangram:{served.token('tests')}@") + "/services/teacher"
    ran = subprocess.run([python, "-c", _TRL, url, json.dumps([IDS, MORE])], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    model, whole, chunked, eight, of_one, of_eight, refused = json.loads(ran.stdout.splitlines()[-1])
    assert model == "teacher" and whole == chunked
    for top_k, given_out, (worker_ids, worker_logprobs) in ((1, whole, of_one), (8, eight, of_eight)):
        found = client.logprobs("teacher", [IDS, MORE], top_k=top_k)
        # The log-probs of the given tokens, for the reverse divergence
        assert [[one for (one,) in sequence] for sequence in given_out["actual_logprobs"]] == found
        # The teacher's most likely tokens, most likely first, for the forward one
        assert (given_out["logprob_token_ids"], given_out["logprobs"]) == (found.top_ids, found.top_logprobs)
        # The asynchronous trainer has both in one list
        for place, token in enumerate(IDS[1:]):
            least = [] if token in found.top_ids[0][place] else [(token, found[0][place])]
            read = list(zip(worker_ids[place], worker_logprobs[place], strict=True))
            assert read == [*zip(found.top_ids[0][place], found.top_logprobs[0][place], strict=True), *least]
    assert refused.startswith("Request failed: 400") and "prompt_logprobs: must be from 0 to 128, not 129" in refused
