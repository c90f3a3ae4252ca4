"""Which actions wait again when an outside API refuses them.

An action never waits for a limit by retrying. A refused action goes back to its place in the queue, and is granted again when the
account's pause is over. Meanwhile its place at the API is free, and actions of a higher priority go first.

Only idempotent actions wait again, and at most `MOST_REFUSALS` times. Otherwise the trainer gets the refusal as the answer. The
scheduler decides this with the grant (`Grant.attempt`), since a worker must know before it stores a result.
"""

from __future__ import annotations

from typing import Final

from scheduler.model import Grant
from scheduler.model.state import wants_cells, wants_cores
from tangram.action import Action

MOST_REFUSALS: Final = 5
"""Refused tries that are repeated. Each is one more than the number of its grant, also after a restart."""


def may_wait_again(action: Action, grant: Grant) -> bool:
    """Say whether an action goes back to the queue when an outside API refuses it under this grant."""
    return only_calls(action) and action.idempotent and grant.attempt <= MOST_REFUSALS


def only_calls(action: Action) -> bool:
    """Say whether an action draws on quotas and holds nothing else."""
    return bool(action.cost.quotas) and action.environment is None and not (wants_cells(action) or wants_cores(action))
