"""How answers of a server are read: whatever is missing is an error and never a number."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.gpu.engines.canary import Answer
from workers.gpu.engines.vllm import questions
from workers.gpu.errors import CallFailed


@given(st.lists(st.integers(1, 50)), st.integers(1, 8), st.integers(1, 100))
def test_portions_hold_every_input_in_order_within_both_bounds(lengths: list[int], most: int, most_tokens: int) -> None:
    inputs = [[index] * length for index, length in enumerate(lengths)]
    cut = questions.portions(inputs, most, most_tokens)
    assert [ids for portion in cut for ids in portion] == inputs
    for portion in cut:
        assert 1 <= len(portion) <= most
        assert len(portion) == 1 or sum(map(len, portion)) <= most_tokens


def test_answers_are_put_in_the_order_of_their_indices() -> None:
    answer = {"data": [{"index": 1, "probs": [2.5]}, {"index": 0, "probs": [-1.0]}]}
    assert questions.read_scores(answer, 2, 0) == [-1.0, 2.5]


@pytest.mark.parametrize(
    ("key", "given_score", "pooling"),
    [
        *[("probs", probs, "classify") for probs in ([], [0.5, 0.5], [float("nan")], [None])],
        *[("data", data, "reward") for data in ([], [[0.1, 0.9]], [0.5], [[float("nan")]])],
    ],
)
def test_a_score_that_is_none_is_named(key: str, given_score: Any, pooling: Any) -> None:
    with pytest.raises(CallFailed, match=r"items\[7\]: the model's score is "):
        questions.read_scores({"data": [{"index": 0, key: given_score}]}, 1, 7, pooling)


@pytest.mark.parametrize(
    "given_logprobs",
    [
        None,
        [None],
        [None, None],
        [None, {"6": {"logprob": -1.0}}],
        [None, {"5": {"logprob": None}}],
        [None, {"5": {"logprob": float("nan")}}],
    ],
)
def test_a_logprob_of_another_token_or_none_is_named(given_logprobs: Any) -> None:
    answer = {"choices": [{"index": 0, "prompt_logprobs": given_logprobs}]}
    with pytest.raises(CallFailed, match=r"sequences\[3\]"):
        questions.read_logprobs(answer, [[4, 5]], 3)


def test_an_id_among_the_most_likely_is_ranked_after_those_that_are_more_likely_and_any_other_as_the_server_says() -> None:
    top = {"7": {"logprob": -1.0, "rank": 1}, "5": {"logprob": -1.0, "rank": 2}}
    other = {"6": {"logprob": -9.0, "rank": 40}, **top}
    (said,) = questions.read_logprobs({"choices": [{"index": 0, "prompt_logprobs": [None, top, other]}]}, [[4, 5, 6]], 0, 2)
    assert (said.ranks, said.top_ids, said.top_logprobs) == ([1, 40], [7, 5, 7, 5], [-1.0] * 4)


@pytest.mark.parametrize("more", [{}, {"7": {"logprob": -1.0}}, {"x": {"logprob": -1.0, "rank": 1}}, {"7": {"logprob": None, "rank": 1}}])
def test_most_likely_ids_that_are_not_there_are_named(more: dict[str, Any]) -> None:
    answer = {"choices": [{"index": 0, "prompt_logprobs": [None, {"5": {"logprob": -2.0, "rank": 2}, **more}]}]}
    with pytest.raises(CallFailed, match=r"sequences\[3\]: the server does not give ranks and 1 most likely tokens"):
        questions.read_logprobs(answer, [[4, 5]], 3, 1)


@pytest.mark.parametrize("answer", [None, {}, {"data": []}, {"data": [{"index": 0, "probs": [1.0]}] * 3}])
def test_more_or_fewer_answers_than_inputs_are_an_error(answer: Any) -> None:
    with pytest.raises(CallFailed, match="answers to 2 inputs"):
        questions.read_scores(answer, 2, 0)


def generated(ids: object, *logprobs: object) -> dict[str, object]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": list(logprobs)}}]}


def test_an_end_token_is_left_out_of_a_text() -> None:
    ends = frozenset({9})
    assert questions.read_generated(generated([1, 2, 9], -1.0, -1.0, 0.0), 0, ends) == [1, 2]
    assert questions.read_generated(generated([1, 2], -1.0, -1.0), 0, ends) == [1, 2]
    with pytest.raises(CallFailed, match="return_token_ids"):
        questions.read_generated({"choices": [{"text": "x"}]}, 0, ends)


@pytest.mark.parametrize("logprobs", [(-1.0,), (-1.0, None), (-1.0, math.nan), (-1.0, -math.inf)])
def test_a_text_whose_tokens_have_no_log_probs_is_none(logprobs: tuple[object, ...]) -> None:
    with pytest.raises(CallFailed, match=r"^prompts\[3\]: the log-probs .* are not numbers$"):
        questions.read_generated(generated([1, 2], *logprobs), 3, frozenset())


def test_an_answer_to_a_fixed_question_has_the_log_probs_of_its_own_ids_and_of_those_that_continue_it() -> None:
    prompt = [None, {"5": {"logprob": -1.0}}]
    whole = {"index": 0, "prompt_logprobs": prompt, "token_ids": [1, 2, 3, 4], "logprobs": {"token_logprobs": [-2.0, -3.0, -4.0, -5.0]}}
    found = questions.read_canary({"choices": [whole]}, "logprobs", [4, 5])
    assert found == Answer((-1.0, -2.0, -3.0, -4.0, -5.0), (1, 2, 3, 4))
    for broken in ({**whole, "logprobs": None}, {**whole, "logprobs": {"token_logprobs": [-2.0]}}, {**whole, "token_ids": [1]}):
        with pytest.raises(CallFailed, match="no log-prob for each of 4 tokens"):
            questions.read_canary({"choices": [broken]}, "logprobs", [4, 5])


def test_a_reward_model_is_asked_for_every_token_and_the_last_one_counts() -> None:
    asked = questions.score_request("rm", [[1, 2], [3]], "reward")
    answer = {"data": [{"index": 1, "data": [[3.5]]}, {"index": 0, "data": [[0.5], [-2]]}]}
    assert asked == (
        "POST",
        "/pooling",
        {"model": "rm", "input": [[1, 2], [3]], "use_activation": False, "task": "token_classify", "encoding_format": "float"},
    )
    assert questions.read_scores(answer, 2, 0, "reward") == [-2.0, 3.5]
