"""Batches, blocks of weights and host copies: the parts below the torch engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lazily import Lazily, needs

pytestmark = needs("torch")
torch = Lazily("torch")
compute, host_copy, weights = (Lazily(f"workers.gpu.engines.{name}") for name in ("compute", "host_copy", "weights"))


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(1, 300), st.integers(1, 5))
def test_devices_get_like_shares_of_every_input_once_in_batches_within_bounds(lengths: list[int], most_tokens: int, devices: int) -> None:
    shares = compute.share_out(lengths, most_tokens, devices)
    assert sorted(index for share in shares for batch in share for index in batch) == list(range(len(lengths)))
    for batch in (batch for share in shares for batch in share):
        assert len(batch) * max(lengths[index] for index in batch) <= most_tokens or len(batch) == 1
    had = [[lengths[index] for batch in share for index in batch] for share in shares]
    assert len(had) == devices
    assert max(map(len, had)) - min(map(len, had)) <= 1
    assert max(map(sum, had)) - min(map(sum, had)) <= max(lengths, default=0)


@pytest.mark.parametrize("logits", [[math.inf, 0.0], [math.nan, 0.0], [-math.inf, -math.inf]])
def test_logits_that_are_no_numbers_give_no_log_prob_of_any_id(logits: list[float]) -> None:
    said = compute.read_logits(torch.tensor([logits, [0.0, -math.inf]]), torch.tensor([1, 1]), 2)
    assert math.isnan(said.logprobs[0]) and said.logprobs[1] == -math.inf
    assert [math.isnan(value) for value in said.top_logprobs] == [True, True, False, False]


def odd() -> Any:
    """Make a module of tied, empty, scalar, boolean and half-precision tensors."""
    module = torch.nn.Module()
    module.first, module.tied = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)
    module.tied.weight = module.first.weight
    module.nothing = torch.nn.Parameter(torch.empty(0, 4))
    module.scalar = torch.nn.Parameter(torch.tensor(2.5))
    module.small = torch.nn.Parameter(torch.randn(7).bfloat16())
    module.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)
    return module


def values(module: Any) -> list[bytes]:
    return [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in [*module.parameters(), *module.buffers()]
    ]


def test_a_block_holds_every_kind_of_tensor_and_gives_it_back_bit_by_bit() -> None:
    module = odd().requires_grad_(False)
    before, shapes = values(module), [tensor.shape for tensor in module.parameters()]
    layout = weights.Layout.of(module)
    block = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    layout.take(module, block)
    left = [tensor.numel() for tensor in [*module.parameters(), *module.buffers()]]
    layout.fill(module, block)
    assert set(left) == {0}
    assert values(module) == before
    assert [tensor.shape for tensor in module.parameters()] == shapes
    assert module.tied.weight is module.first.weight


def test_a_file_copy_that_was_cut_short_is_an_error_and_not_wrong_weights(tmp_path: Path) -> None:
    copy = host_copy.FileCopy(torch.ones(1000, dtype=torch.uint8), tmp_path)
    copy._file.truncate(400)
    with pytest.raises(OSError, match="ends after 400 of 1000 bytes"):
        copy.load([torch.zeros(1000, dtype=torch.uint8)])
