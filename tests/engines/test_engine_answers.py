"""What engines answer: the model's numbers and texts, in the order of the inputs, whatever is computed beside them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangram.arrays import by_position
from tests.engines.kinds import MODELS, Kind, engines
from tests.engines.reference import greedy_texts, known_logprobs
from workers.gpu.errors import BadInput, NotSupported
from workers.gpu.items import TokenLogprobs

ITEMS: list[dict[str, object]] = [
    {"prompt": "What is 2 + 3?", "response": "5"},
    {"prompt": "What is the capital of France?", "response": "Paris, of course. " * 8},
    {"prompt": "", "response": "x"},
    {"prompt": "def add(left, right):", "response": "    return left + right"},
    {"prompt": "ends with the padding token", "response": "so<|endoftext|>"},
]
SEQUENCES = [[5, 17, 33], [6, 17, 33, 40, 41, 300, 511, 0, 0, 12], [9], [0, 0], list(range(100, 200))]
TALK = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 3?"}]
WRITTEN = "<|system|>Be short.\n<|user|>2 + 3?\n"
few = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=6)


@engines(computes=True)
def test_scores_are_the_raw_numbers_of_the_model(kind: Kind) -> None:
    scores = kind.shared("score").score(ITEMS)
    assert scores == pytest.approx(kind.expected_scores([f"{item['prompt']}\n{item['response']}" for item in ITEMS]), abs=kind.can.close)
    assert max(scores) - min(scores) > 0.1


@engines(computes=True)
def test_log_probs_are_those_of_the_model(kind: Kind) -> None:
    answers = kind.shared("logprobs").logprobs(SEQUENCES)
    for values, wanted in zip(answers, kind.expected_logprobs(SEQUENCES), strict=True):
        assert values == pytest.approx(wanted, abs=kind.can.close)


@engines()
def test_equal_questions_get_equal_answers_in_their_order_and_others_get_others(kind: Kind) -> None:
    first, other, again = kind.shared("score").score([ITEMS[0], ITEMS[1], ITEMS[0]])
    long, short, last, before, single = kind.shared("logprobs").logprobs([[1, 2, 3], [1, 2], [1, 2, 4], [400, 2, 3], [7]])
    assert first == pytest.approx(again, abs=kind.can.close) and abs(first - other) > kind.can.close
    assert [len(values) for values in (long, short, single)] == [2, 1, 0]
    # A log-prob depends on the ids before it, and on none behind it
    assert long[0] == pytest.approx(short[0], abs=kind.can.close) == pytest.approx(last[0], abs=kind.can.close)
    assert abs(long[1] - last[1]) > kind.can.close and abs(long[1] - before[1]) > 0.1


@engines()
def test_empty_requests_get_empty_answers(kind: Kind) -> None:
    teacher = kind.shared("logprobs")
    assert (kind.shared("score").score([]), teacher.logprobs([]), teacher.ranked([], 3), teacher.generate([])) == ([], [], [], [])


@engines(made=True)
@few
@given(sequences=st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=40), max_size=9))
def test_a_batch_gives_the_log_probs_of_one_by_one(kind: Kind, sequences: list[list[int]]) -> None:
    teacher = kind.shared("logprobs")
    for values, ids in zip(teacher.logprobs(sequences), sequences, strict=True):
        assert values == pytest.approx(teacher.logprobs([ids])[0], abs=kind.can.close)


@engines(made=True)
@few
@given(pairs=st.lists(st.tuples(st.text(max_size=20), st.text(min_size=1, max_size=60)), max_size=9))
def test_a_batch_gives_the_scores_of_one_by_one(kind: Kind, pairs: list[tuple[str, str]]) -> None:
    texts = [[text.encode("utf-8", "replace").decode() for text in pair] for pair in pairs]
    items = [{"prompt": prompt, "response": response} for prompt, response in texts]
    judge = kind.shared("score")
    assert judge.score(items) == pytest.approx([judge.score([item])[0] for item in items], abs=kind.can.close)


@engines()
def test_many_callers_at_once_get_the_answers_of_one(kind: Kind) -> None:
    judge, teacher = kind.shared("score"), kind.shared("logprobs")
    scores, logprobs, texts = judge.score(ITEMS), teacher.logprobs(SEQUENCES), teacher.generate(["What is", "def add"], 6)
    with ThreadPoolExecutor(8) as pool:
        scored = [pool.submit(judge.score, ITEMS) for _ in range(12)]
        taught = [pool.submit(teacher.logprobs, SEQUENCES) for _ in range(12)]
        made = [pool.submit(teacher.generate, ["What is", "def add"], 6) for _ in range(4)]
        assert all(call.result(120) == pytest.approx(scores, abs=kind.can.close) for call in scored)
        for call in taught:
            assert call.result(120) == [pytest.approx(values, abs=kind.can.close) for values in logprobs]
        assert [call.result(120) for call in made] == [texts] * 4


@engines()
def test_temperature_0_is_greedy_and_above_it_the_seed_decides(kind: Kind) -> None:
    teacher = kind.shared("logprobs")
    greedy, drawn = teacher.generate(["What is"], 16, seed=3), teacher.generate(["What is"], 16, temperature=1.0, seed=7)
    if kind.name != "made-up vllm":  # which has nothing but seeds
        assert teacher.generate(["What is"], 16, seed=4) == greedy
    if kind.name == "torch":  # as small as it may be
        assert teacher.generate(["What is"], 16, temperature=1e-300) == greedy
    assert teacher.generate(["What is"], 16, temperature=1.0, seed=7) == drawn != teacher.generate(["What is"], 16, temperature=1.0, seed=8)


@engines(transformers=True)
def test_greedy_texts_and_conversations_are_continued_as_transformers_does(kind: Kind) -> None:
    prompts = ["def add(left", "What is"]
    texts = kind.shared("logprobs").generate([*prompts, TALK], max_tokens=12)
    assert texts == greedy_texts(kind.models / MODELS["logprobs"], [*prompts, WRITTEN], 12)


@engines(computes=True)
def test_a_whole_text_is_scored_as_it_is_and_a_conversation_as_the_chat_template_writes_it(kind: Kind) -> None:
    judge, answer = kind.shared("score"), [{"role": "assistant", "content": "5"}]
    scores = judge.score(
        [{"prompt": TALK, "response": answer}, {"prompt": TALK, "response": "5"}, {"response": f"{WRITTEN}<|assistant|>5\n"}]
    )
    assert scores == pytest.approx(kind.expected_scores([f"{WRITTEN}<|assistant|>5\n"]) * 3, abs=kind.can.close)


@engines(transformers=True, made=True)
@pytest.mark.parametrize(
    ("table", "item", "written"),
    [
        ({"separator": " => "}, {"prompt": "a", "response": "b"}, "a => b"),
        (
            {"score_template": "Q: {prompt} A: {response}!"},
            {"prompt": "a {response}", "response": "{prompt}"},
            "Q: a {response} A: {prompt}!",
        ),
        ({"score_template": "Q: {prompt} A: {response}!"}, {"response": "2 + 3 = 5"}, "2 + 3 = 5"),
        ({"chat_template": "chat.jinja"}, {"prompt": TALK[1:], "response": "5"}, "[user] 2 + 3?[assistant] 5"),
    ],
)
def test_a_service_may_say_how_its_texts_are_put_together(kind: Kind, table: Any, item: Any, written: str, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}")
    judge = kind.started(**{key: file if value == file.name else value for key, value in table.items()})
    assert judge.score([item]) == pytest.approx(kind.expected_scores([written]), abs=kind.can.close)


def must_fit(said: TokenLogprobs, ids: list[int], top_k: int) -> None:
    """Check ranks and most likely ids against each other; ids that are as likely may change places."""
    assert len(said.logprobs) == len(said.ranks) == len(ids) - 1
    tops = zip(by_position(said.top_ids, len(ids) - 1), by_position(said.top_logprobs, len(ids) - 1), strict=True)
    for token, value, rank, (top_ids, values) in zip(ids[1:], said.logprobs, said.ranks, tops, strict=True):
        assert all(higher >= lower for higher, lower in pairwise(values)) and len(set(top_ids)) == len(top_ids) == top_k
        more, same = (sum(test(other - value) for other in values) for test in (lambda off: off > 1e-6, lambda off: abs(off) <= 1e-6))
        assert more <= min(rank - 1, top_k) <= more + same
        assert (token not in top_ids) or values[top_ids.index(token)] == pytest.approx(value, abs=1e-6)
        assert (token in top_ids) == (rank <= top_k) or value == pytest.approx(min(values, default=value), abs=1e-6)


@engines()
@pytest.mark.parametrize("top_k", [0, 1, 8, 128])
def test_ranks_and_most_likely_ids_fit_the_log_probs(kind: Kind, top_k: int) -> None:
    teacher = kind.shared("logprobs")
    sequences = [[5, 17, 34, 33], [9], *([[(37 * place) % 300 for place in range(120)]] if kind.name != "made-up vllm" else [])]
    found = teacher.ranked(sequences, top_k)
    for said, ids, values in zip(found, sequences, teacher.logprobs(sequences), strict=True):
        assert said.logprobs == pytest.approx(values, abs=kind.can.close)
        must_fit(said, ids, top_k)
    assert top_k != 8 or max(rank for said in found for rank in said.ranks) > 8


@engines(transformers=True)
@pytest.mark.parametrize("top_k", [1, 8, 128])
def test_ranks_and_most_likely_ids_are_those_of_transformers(kind: Kind, top_k: int) -> None:
    found, close = kind.shared("logprobs").ranked(SEQUENCES, top_k), kind.can.close
    for said, ids, known in zip(found, SEQUENCES, known_logprobs(kind.models / MODELS["logprobs"], SEQUENCES), strict=True):
        tops = zip(by_position(said.top_ids, len(ids) - 1), by_position(said.top_logprobs, len(ids) - 1), strict=True)
        for row, token, rank, (top_ids, values) in zip(known, ids[1:], said.ranks, tops, strict=False):
            own = row[token]
            assert int((row > own + close).sum()) + 1 <= rank <= int((row >= own - close).sum())
            assert list(values) == pytest.approx(row.topk(top_k).values.tolist(), abs=close)
            assert list(values) == pytest.approx([float(row[top]) for top in top_ids], abs=close)


@engines()
def test_a_service_is_not_asked_for_what_it_does_not_do(kind: Kind) -> None:
    judge = kind.shared("score")
    for ask, words in ((judge.logprobs, "log-probs"), (judge.generate, "generate"), (lambda asked: judge.ranked(asked, 1), "log-probs")):
        with pytest.raises(NotSupported, match=f"'score'.*{words}"):
            ask([[1, 2]])
    with pytest.raises(NotSupported, match=r"'logprobs'.*score"):
        kind.shared("logprobs").score(ITEMS)
    for top_k in (-1, 129, True, 1.5, "8"):
        with pytest.raises(BadInput, match="top_k: "):
            kind.shared("logprobs").ranked([[1, 2]], top_k)  # type: ignore[arg-type]
