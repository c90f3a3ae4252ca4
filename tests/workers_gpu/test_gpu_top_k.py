"""Ranks and the most likely ids of the torch engine, against log-softmax and top-k of plain transformers; and those of the stub."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tangram.arrays import by_position  # noqa: E402
from workers.gpu.devices import Device  # noqa: E402
from workers.gpu.engines import compute  # noqa: E402
from workers.gpu.engines.stub import StubEngine  # noqa: E402
from workers.gpu.engines.torch_hf import TorchEngine  # noqa: E402
from workers.gpu.errors import BadInput, NotSupported  # noqa: E402
from workers.gpu.items import Reading, TokenLogprobs  # noqa: E402

CLOSE = 1e-4
SEQUENCES = [[5, 17, 33], [6, 17, 33, 40, 41, 300, 511, 0, 0, 12], [9], [0, 0], list(range(100, 200))]
Known = Callable[[list[int]], "torch.Tensor"]


@pytest.fixture(scope="module")
def teacher(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchEngine]:
    made = TorchEngine("teacher-0", "logprobs", models / "teacher-0", tmp_path_factory.mktemp("state"), max_concurrency=8)
    made.start([Device("cpu:0", "cpu", 1000, "cpu")])
    yield made
    made.stop()


@pytest.fixture(scope="module")
def known(models: Path) -> Known:
    """Return log-probs of the whole vocabulary at each position but the first, read without a batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "teacher-0", dtype=torch.float32).eval()

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)

    return logprobs


def must_be_those(said: TokenLogprobs, ids: list[int], expected: torch.Tensor, top_k: int) -> None:
    """Compare with log-probs of the vocabulary; ids that are as likely as each other may change places."""
    assert said.logprobs == pytest.approx([float(row[token]) for row, token in zip(expected, ids[1:], strict=True)], abs=CLOSE)
    tops = zip(by_position(said.top_ids, len(ids) - 1), by_position(said.top_logprobs, len(ids) - 1), strict=True)
    for row, token, rank, (top_ids, values) in zip(expected, ids[1:], said.ranks, tops, strict=True):
        own = row[token]
        assert int((row > own + CLOSE).sum()) + 1 <= rank <= int((row >= own - CLOSE).sum())
        assert len(set(top_ids)) == len(top_ids) == top_k
        assert list(values) == pytest.approx(row.topk(top_k).values.tolist(), abs=CLOSE)
        assert list(values) == pytest.approx([float(row[top]) for top in top_ids], abs=CLOSE)


@pytest.mark.parametrize("top_k", [0, 1, 8, 128])
def test_ranks_and_most_likely_ids_are_those_of_plain_transformers(teacher: TorchEngine, known: Known, top_k: int) -> None:
    answers = teacher.ranked(SEQUENCES, top_k)

    for said, ids in zip(answers, SEQUENCES, strict=True):
        must_be_those(said, ids, known(ids), top_k)
    assert max(answers[-1].ranks) > 1


def test_without_top_k_nothing_is_ranked_and_the_log_probs_are_the_same(teacher: TorchEngine) -> None:
    plain = teacher.logprobs(SEQUENCES)

    for said, values in zip(teacher.ranked(SEQUENCES, 4), plain, strict=True):
        assert said.logprobs == pytest.approx(values, abs=CLOSE)


def test_logits_that_are_read_in_parts_give_the_same(teacher: TorchEngine, known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "_LOGITS_AT_ONCE", 3 * 512)

    for said, ids in zip(teacher.ranked(SEQUENCES, 5), SEQUENCES, strict=True):
        must_be_those(said, ids, known(ids), 5)


def test_ids_that_are_as_likely_have_the_same_rank_and_a_small_vocabulary_is_given_whole() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, float("-inf")]])

    said = compute.read_logits(logits, torch.tensor([2, 3]), 9)

    assert said.ranks == [1, 4]
    assert sorted(said.top_ids[:2]) == [1, 2] and said.top_ids[2:4] == [3, 0]
    assert len(said.top_ids) == 8 and said.top_logprobs[7] == float("-inf")


def test_calls_that_are_computed_together_have_each_a_top_k_of_its_own(
    teacher: TorchEngine, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a call that holds the device
    began, gate, batches = threading.Event(), threading.Event(), list[list[int | None]]()
    real = compute.logprobs

    def slow(model: object, batch: list[Reading]) -> list[TokenLogprobs]:
        batches.append([reading.top_k for reading in batch])
        began.set()
        assert gate.wait(30)
        return real(model, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(compute, "logprobs", slow)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(teacher.logprobs, [[1, 2]])
        assert began.wait(30)
        # When calls with and without top_k wait for it
        plain = pool.submit(teacher.logprobs, [[6, 17, 33]])
        asked = {top_k: pool.submit(teacher.ranked, SEQUENCES[:2], top_k) for top_k in (0, 2, 7)}
        while len(teacher._sequences._calls) < 5:
            pass
        gate.set()
        # Then they are computed together, and each gets what it asked for
        assert len(first.result(60)[0]) == 1 and len(plain.result(60)[0]) == 2
        for top_k, call in asked.items():
            for said, ids in zip(call.result(60), SEQUENCES[:2], strict=True):
                must_be_those(said, ids, known(ids), top_k)
    assert batches[0] == [None] and set(batches[1]) == {None, 0, 2, 7}


@pytest.mark.parametrize("top_k", [-1, 129, True, 1.5, "8"])
def test_more_than_the_bound_and_what_is_no_number_are_refused(teacher: TorchEngine, top_k: int) -> None:
    with pytest.raises(BadInput, match="top_k: "):
        teacher.ranked([[1, 2]], top_k)


def test_a_reward_model_ranks_nothing() -> None:
    engine = StubEngine("judge", "score", 10.0)
    engine.start([Device("cpu:0", "cpu", 1000, "cpu")])
    with pytest.raises(NotSupported, match="log-probs"):
        engine.ranked([[1, 2]], 1)


def test_a_stub_ranks_as_a_model_does() -> None:
    engine = StubEngine("stub", "logprobs", 10.0)
    engine.start([Device("cpu:0", "cpu", 1000, "cpu")])
    ids = [(37 * place) % 900 for place in range(200)]

    (said,) = engine.ranked([ids], 8)

    assert said.logprobs == engine.logprobs([ids])[0] and said == engine.ranked([ids], 8)[0]
    tops = zip(by_position(said.top_ids, 199), by_position(said.top_logprobs, 199), strict=True)
    for token, value, rank, (top_ids, values) in zip(ids[1:], said.logprobs, said.ranks, tops, strict=True):
        assert all(higher > lower for higher, lower in pairwise(values)) and len(set(top_ids)) == 8
        assert sum(other > value for other in values) == min(rank - 1, 8)
        assert (token in top_ids) == (rank <= 8) and (rank > 8 or values[top_ids.index(token)] == value)
    assert {rank > 8 for rank in said.ranks} == {True, False}
