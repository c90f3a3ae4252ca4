"""Batches of numbers through a whole stack: arrays in, lists out, and what is wrong named by its index."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tangram import Action, ActionFailed, AsyncClient, Client, InvalidAction
from tests.live.support import Live

pytestmark = pytest.mark.usefixtures("gpu_node")

SEQUENCES = [[1, 2, 3], [4, 5], [6]]


def test_a_batch_is_the_same_however_its_ids_are_given(client: Client) -> None:
    numpy = pytest.importorskip("numpy")
    expected = client.logprobs("teacher", SEQUENCES)

    assert [len(row) for row in expected] == [2, 1, 0]
    assert client.logprobs("teacher", [array("q", ids) for ids in SEQUENCES]) == expected
    assert client.logprobs("teacher", [numpy.array(ids) for ids in SEQUENCES]) == expected
    plain = Action(kind="gpu.logprobs", service="teacher", arguments={"service": "teacher", "token_ids": SEQUENCES})
    assert client.submit(plain).result() == expected


def test_a_batch_above_the_threshold_of_blobs_comes_back_whole(client: Client) -> None:
    batch = [list(range(row, row + 2000)) for row in range(16)]

    rows = client.logprobs("teacher", batch)

    assert [len(row) for row in rows] == [1999] * 16
    assert rows[3] == client.logprobs("teacher", [batch[3]])[0]


def test_ranks_and_most_likely_ids_of_a_large_batch_come_back_whole(client: Client) -> None:
    batch = [list(range(row, row + 512)) for row in range(8)]

    found = client.logprobs("teacher", batch, top_k=20)

    assert found == client.logprobs("teacher", batch)
    assert [len(row) for row in found.ranks] == [511] * 8
    assert {len(ids) for row in found.top_ids for ids in row} == {20} == {len(values) for row in found.top_logprobs for values in row}
    for ids, ranks, tops in zip(batch, found.ranks, found.top_ids, strict=True):
        assert all((token == top[rank - 1]) for token, rank, top in zip(ids[1:], ranks, tops, strict=True) if rank <= 20)
    assert client.logprobs("teacher", batch[:1]).ranks == ()


def test_empty_batches_get_empty_answers(client: Client) -> None:
    assert client.score("judge", []) == []
    assert client.logprobs("teacher", []) == []
    assert client.generate("teacher", []) == []
    ranked = client.logprobs("teacher", [], top_k=3)
    assert (ranked, ranked.ranks, ranked.top_ids) == ([], [], [])


def test_what_is_wrong_with_a_batch_is_said_with_its_index(client: Client) -> None:
    with pytest.raises(InvalidAction, match=r"token_ids\[1\].*-7"):
        client.logprobs("teacher", [[1, 2], [3, -7]])
    with pytest.raises(ActionFailed, match=r"sequences\[1\]: List should have at least 1 item"):
        client.logprobs("teacher", [[1, 2], []])
    with pytest.raises(ActionFailed, match=r"items\[1\]\.response: Field required"):
        client.score("judge", [{"prompt": "a", "response": "b"}, {"prompt": "a"}])
    with pytest.raises(ActionFailed, match=r"prompts\[1\]"):
        client.generate("teacher", ["a", 5])  # type: ignore[list-item]
    damaged: dict[str, Any] = {"dtype": "int32", "data": "AAAA", "offsets": [0]}
    with pytest.raises(ActionFailed, match=r"sequences\.data: 3 bytes"):
        client.submit(Action(kind="gpu.logprobs", service="teacher", arguments={"service": "teacher", "token_ids": damaged})).result()


async def test_coroutines_have_the_same_batches(live: Live) -> None:
    async with AsyncClient("tests", settings=live.settings) as client:
        rows = await client.logprobs("teacher", SEQUENCES)
        ranked = await client.logprobs("teacher", SEQUENCES, top_k=2)
        scores = await client.score("judge", [{"prompt": "a", "response": "b"}] * 3)
        texts = await client.generate("teacher", ["a", "b"], max_tokens=2)
        nothing = await client.score("judge", []), await client.logprobs("teacher", []), await client.generate("teacher", [])

    assert [len(row) for row in rows] == [2, 1, 0]
    assert (ranked, [len(row) for row in ranked.top_ids]) == (rows, [2, 1, 0])
    assert (len(scores), len(set(scores)), len(texts)) == (3, 1, 2)
    assert nothing == ([], [], [])
