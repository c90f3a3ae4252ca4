"""The arithmetic on a model that is on a device: scores, log-probs, generated ids, and how inputs are put into batches. No state, no locks.

Inputs are padded on the right and masked. In a causal model no position sees what is to its right, so padding changes only the last
bits, as any other shape of a matrix does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from workers.gpu.control import Control
from workers.gpu.items import Sampling

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
def logprobs(model: PreTrainedModel, batch: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return for each input of n ids the n-1 log-probs of ids 1..n-1, each given all ids before it."""
    ids, mask = _padded(model, batch)
    logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    out: list[list[float]] = []
    for row, tokens in enumerate(batch):
        count = len(tokens) - 1
        # One row at a time in float32: a float32 copy of all logits would double the largest tensor there is.
        known = logits[row, :count].float()
        chosen = known.gather(1, ids[row, 1 : count + 1].unsqueeze(1)).squeeze(1)
        out.append([float(value) for value in (chosen - known.logsumexp(dim=1)).tolist()])
    return out


@torch.inference_mode()
def generate(
    model: PreTrainedModel, prompt: Sequence[int], sampling: Sampling, seed: int, ends: frozenset[int], control: Control
) -> list[int]:
    """Return the ids that continue one prompt, at most `sampling.max_tokens`, the end token left out.

    Each call draws from a generator of its own on the host, so the same seed gives the same text whatever other calls run.
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
    if temperature == 0.0:
        return int(logits.argmax())
    # The largest logit is taken off first, so that a temperature near 0 cannot overflow.
    probabilities = torch.softmax((logits.double() - logits.max()) / temperature, dim=-1)
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
