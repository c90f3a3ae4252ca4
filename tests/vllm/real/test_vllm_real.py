"""A real reward model and a real teacher behind real vLLM servers, which share one cell, against transformers.

Without `.venv-vllm` the tests are skipped; with CI set, that is a failure. They share one stack, and each may begin with
either server awake.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.vllm.real.reference import expected_logprobs, expected_scores, known_logprobs, real_python
from tests.vllm.system import System, services_toml, system

pytestmark = pytest.mark.timeout(300)

ITEMS = [{"prompt": f"Question {index}: what is {index} + 2?", "response": f"It is {index + 2}. " * (1 + index % 5)} for index in range(20)]
SEQUENCES = [[(7 * index + 31 * place) % 512 for place in range(2 + 9 * index)] for index in range(20)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[System]:
    python, folder = real_python(), tmp_path_factory.mktemp("vllm")
    (folder / "services.toml").write_text(services_toml(models, python, {}))
    with system(folder / "state", folder / "services.toml") as up:
        yield up


def test_scores_equal_those_of_transformers(stack: System, models: Path) -> None:
    scores = stack.client.score("rm", ITEMS)
    expected = expected_scores(models / "rm-small", ITEMS)
    assert max(expected) - min(expected) > 0.5
    assert scores == pytest.approx(expected, abs=1e-4)


def test_logprobs_equal_those_of_transformers_and_depend_on_the_context(stack: System, models: Path) -> None:
    logprobs = stack.client.logprobs("teacher", SEQUENCES)
    expected = expected_logprobs(models / "teacher-0", SEQUENCES)
    assert [len(values) for values in logprobs] == [len(ids) - 1 for ids in SEQUENCES]
    for found, wanted in zip(logprobs, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    (other,) = stack.client.logprobs("teacher", [[SEQUENCES[5][0] + 1, *SEQUENCES[5][1:]]])
    assert max(abs(one - another) for one, another in zip(other[1:], logprobs[5][1:], strict=True)) > 0.1


@pytest.mark.parametrize("top_k", [1, 20, 128])
def test_ranks_and_most_likely_tokens_equal_those_of_transformers(stack: System, models: Path, top_k: int) -> None:
    found = stack.client.logprobs("teacher", SEQUENCES, top_k=top_k)
    for index, known in enumerate(known_logprobs(models / "teacher-0", SEQUENCES)):
        for place, token in enumerate(SEQUENCES[index][1:]):
            row, top_ids, values = known[place], found.top_ids[index][place], found.top_logprobs[index][place]
            assert int((row > row[token] + 1e-4).sum()) < found.ranks[index][place] <= int((row >= row[token] - 1e-4).sum())
            assert len(set(top_ids)) == top_k and list(values) == pytest.approx(row.topk(top_k).values.tolist(), abs=1e-4)
            assert list(values) == pytest.approx([float(row[one]) for one in top_ids], abs=1e-4)


def test_a_server_that_was_evicted_sleeps_hangs_on_questions_and_is_woken_before_it_is_asked(stack: System) -> None:
    before = stack.client.score("rm", ITEMS)
    stack.client.logprobs("teacher", SEQUENCES[:1])
    assert stack.sleeps("rm") and not stack.sleeps("teacher")
    server = stack.server("rm").pid
    # What the guards are for: nothing but `/is_sleeping` tells that this server will not answer.
    stack.ask("rm", "GET", "/v1/models")
    with pytest.raises(httpx.ReadTimeout):
        stack.ask("rm", "POST", "/classify", {"model": "rm", "input": [[1, 2]]}, timeout_s=1.0)
    assert stack.client.score("rm", ITEMS) == before
    assert stack.sleeps("teacher") and not stack.sleeps("rm")
    assert stack.server("rm").pid == server


def test_many_trainers_asking_both_at_once_are_all_answered_the_same(stack: System) -> None:
    scores = stack.client.score("rm", ITEMS[:3])
    logprobs = stack.client.logprobs("teacher", SEQUENCES[:3])
    with ThreadPoolExecutor(12) as pool:
        scored = [pool.submit(stack.client.score, "rm", ITEMS[:3]) for _ in range(12)]
        taught = [pool.submit(stack.client.logprobs, "teacher", SEQUENCES[:3]) for _ in range(12)]
        for future in scored:
            assert future.result() == pytest.approx(scores, abs=1e-4)
        for future in taught:
            for found, wanted in zip(future.result(), logprobs, strict=True):
                assert found == pytest.approx(wanted, abs=1e-4)


def test_texts_are_continued_greedily_and_by_seed(stack: System, models: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = ["for index in range", "What is the capital of"]
    texts = stack.client.generate("teacher", prompts, max_tokens=12)
    tokenizer = AutoTokenizer.from_pretrained(models / "teacher-0")
    model = AutoModelForCausalLM.from_pretrained(models / "teacher-0", dtype=torch.float32).eval()
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert text == tokenizer.decode(made, skip_special_tokens=True)
    drawn = [stack.client.generate("teacher", prompts, max_tokens=12, temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_server_whose_engine_is_killed_at_work_is_started_once_and_every_action_is_done(stack: System) -> None:
    before = stack.client.score("rm", ITEMS)
    killed = stack.server("rm").pid
    answers = stack.kill_while_it_works(stack.core("rm"), [lambda: stack.client.score("rm", ITEMS)] * 12)
    for answer in answers:
        assert answer == pytest.approx(before, abs=1e-4)
    assert stack.server("rm").pid != killed
    (log,) = (stack.live.stack.state_dir / "services").glob("vllm-rm-*.log")
    # Each start sets the log of the one before aside: that one is the killed server's, so there was one start.
    assert f"pid={killed})" in log.with_name(log.name + ".1").read_text()
    stack.live.until(lambda: stack.ends().keys() == {"succeeded"})
