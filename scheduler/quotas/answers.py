"""Which actions wait again when an outside API refuses them.

Limits are waited for in the queue, never by retrying: an action that was refused goes back to where it stood and is
granted again when the account's pause is over, so that its place is free meanwhile and whoever has priority goes first.
Only idempotent actions do, and only so often; otherwise the trainer gets the refusal as the answer. Who decides is the
scheduler, when it grants (`Grant.attempt`): the worker must know, before it stores a result, whether it may not.
"""

from __future__ import annotations

from typing import Final

from scheduler.model import Grant
from scheduler.model.state import wants_cells, wants_cores
from tangram.action import Action

MOST_REFUSALS: Final = 5
"""Refused tries that are repeated; each is one more than the number of its grant says, also after a restart."""


def may_wait_again(action: Action, grant: Grant) -> bool:
    """Say whether an action goes back to the queue when an outside API refuses it under this grant."""
    return only_calls(action) and action.idempotent and grant.attempt <= MOST_REFUSALS


def only_calls(action: Action) -> bool:
    """Say whether an action draws on quotas and holds nothing else."""
    return bool(action.cost.quotas) and action.environment is None and not (wants_cells(action) or wants_cores(action))
