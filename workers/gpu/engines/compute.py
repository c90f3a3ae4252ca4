"""The arithmetic on a model that is on a device: scores, log-probs, generated ids, and how inputs are put into batches. No state, no locks.

Inputs are padded on the right and masked. In a causal model no position sees what is to its right, so padding changes only the last
bits, as any other shape of a matrix does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.gpu.call_control import CallControl
from workers.gpu.items import Reading, Sampling, TokenLogprobs

_LOGITS_AT_ONCE = 1 << 25

Batch = list[int]
"""Indices of inputs that are computed together."""


@torch.inference_mode()
def scores(model: PreTrainedModel, batch: Sequence[Sequence[int]]) -> list[float]:
    """Return the raw logit of each input.

    A decoder's logit is read at the last token of the input, as vLLM does. The pooling of transformers looks for the padding token
    instead, and would skip a real last token that equals it.
    """
    ids, mask = _padded(model, batch)
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
        return [float(value) for value in logits[:, 0].float().tolist()]
    hidden: torch.Tensor = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(batch), device=ids.device), mask.sum(dim=1) - 1]
    return [float(value) for value in head(last)[:, 0].float().tolist()]


@torch.inference_mode()
def logprobs(model: PreTrainedModel, batch: Sequence[Reading]) -> list[TokenLogprobs]:
    """Return what the model says about each input, each of which may have a `top_k` of its own."""
    ids, mask = _padded(model, [reading.ids for reading in batch])
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return [
        read_logits(logits[row, : len(reading.ids) - 1], ids[row, 1 : len(reading.ids)], reading.top_k) for row, reading in enumerate(batch)
    ]


def read_logits(logits: torch.Tensor, ids: torch.Tensor, top_k: int | None) -> TokenLogprobs:
    """Read the log-probs of ids from logits, positions x vocabulary; with `top_k` also ranks and the most likely ids."""
    most = max(1, _LOGITS_AT_ONCE // logits.shape[1])
    # A float32 copy of all logits would double the largest tensor there is, and a comparison of all of them adds a quarter of that.
    parts = [_read_slice(some.float(), given, top_k) for some, given in zip(torch.split(logits, most), torch.split(ids, most), strict=True)]
    values, *ranked = (torch.cat(tensors).flatten().tolist() for tensors in zip(*parts, strict=True))
    return TokenLogprobs(values, *ranked)


def _read_slice(known: torch.Tensor, given: torch.Tensor, top_k: int | None) -> tuple[torch.Tensor, ...]:
    """Return log-probs, and with `top_k` ranks, most likely ids and their log-probs, for some positions.

    All log-probs of a position are NaN where one of its logits is, or the largest is infinite.
    """
    chosen, total = known.gather(1, given.unsqueeze(1)), known.logsumexp(dim=1, keepdim=True)
    total.masked_fill_(~total.isfinite(), math.nan)
    if top_k is None:
        return (chosen - total,)
    ranks = (known > chosen).sum(dim=1, dtype=torch.int32) + 1
    top = known.topk(min(top_k, known.shape[1]), dim=1)
    return chosen - total, ranks, top.indices, top.values - total


@torch.inference_mode()
def generate(
    model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling, seed: int, ends: frozenset[int], control: CallControl
) -> list[int]:
    """Return the ids that continue one prompt, at most `sampling.max_tokens`, the end token left out.

    Each call draws from a generator of its own on the host, so the same seed gives the same text whatever other calls run.
    Raises `FloatingPointError` where the logits are not numbers.
    """
    draws = torch.Generator().manual_seed(seed)
    # Only the last logits are looked at; those of a whole prompt could be the largest tensor there is.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    step, cache, out = torch.tensor([list(prompt)], device=model.device), None, list[int]()
    while len(out) < sampling.max_tokens:
        control.check()
        answer = model(input_ids=step, past_key_values=cache, use_cache=True, **last)
        cache = answer.past_key_values
        token = _choose(answer.logits[0, -1].float().cpu(), sampling.temperature, draws)
        if token in ends:
            break
        out.append(token)
        step = torch.tensor([[token]], device=model.device)
    return out


def _choose(logits: torch.Tensor, temperature: float, draws: torch.Generator) -> int:
    largest = logits.max()  # NaN where any is
    if not largest.isfinite():
        raise FloatingPointError("the model's logits are not numbers")
    if temperature == 0.0:
        return int(logits.argmax())
    # The largest logit is taken off first, so that a temperature near 0 cannot overflow.
    probabilities = torch.softmax((logits.double() - largest) / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=draws))


def _padded(model: PreTrainedModel, batch: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, inputs x longest; the padding id is any valid one, since it is masked."""
    longest = max(len(tokens) for tokens in batch)
    ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in batch], dtype=torch.long)
    mask = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in batch], dtype=torch.long)
    return ids.to(model.device), mask.to(model.device)


def share_out(lengths: Sequence[int], most_tokens: int, devices: int) -> list[list[Batch]]:
    """Return for each device its batches, which are lists of indices of `lengths`, each index exactly once.

    Inputs of like length go together, so that a batch, padded to its longest, has at most `most_tokens` tokens; an input
    longer than that is a batch of its own. Devices get like numbers of inputs and like mixtures of lengths.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [_batches(order[device::devices], lengths, most_tokens) for device in range(devices)]


def _batches(order: Sequence[int], lengths: Sequence[int], most_tokens: int) -> list[Batch]:
    """Cut indices, longest input first, into batches within the bound."""
    batches: list[Batch] = []
    for index in order:
        current = batches[-1] if batches else []
        if current and (len(current) + 1) * lengths[current[0]] <= most_tokens:
            current.append(index)
        else:
            batches.append([index])
    return batches
