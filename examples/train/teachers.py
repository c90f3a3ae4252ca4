"""Who gives the log-probs of a teacher: a service of the stack, or a model in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoModelForCausalLM

from tangram import ActionLost, Client, StackUnreachable


class Teacher(Protocol):
    """A model that has been trained before."""

    def __call__(self, rows: list[list[int]]) -> list[list[float] | None]:
        """Return the log-prob of each id of a row but the first, for each row; None where the stack failed."""


class StackTeacher:
    """A service of the stack. All rows are one action, which gets a cell when it starts."""

    def __init__(self, client: Client, service: str) -> None:
        """Ask for nothing yet."""
        self._client, self._service = client, service

    def __call__(self, rows: list[list[int]]) -> list[list[float] | None]:
        """Return log-probs; see `Teacher`."""
        try:
            return list(self._client.logprobs(self._service, rows))
        except (ActionLost, StackUnreachable) as error:
            print(f"the stack failed: {error}", file=sys.stderr)
            return [None] * len(rows)


class LocalTeacher:
    """A model in this process."""

    def __init__(self, folder: Path) -> None:
        """Load it."""
        self._model = AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def __call__(self, rows: list[list[int]]) -> list[list[float] | None]:
        """Return log-probs; see `Teacher`."""
        ids = torch.tensor(rows)
        return self._model(ids).logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2).tolist()
