"""What an outside API's answer means for its account, and for the action that it refused.

Limits are waited for in the queue, never by retrying: an action that was refused goes back to where it stood and is
granted again when the account's pause is over, so that its place is free meanwhile and whoever has priority goes first.
Only idempotent actions do, and only so often; otherwise the trainer gets the refusal as the answer. Who decides is the
scheduler, when it grants (`Grant.attempt`): the worker must know, before it stores a result, whether it may not.
"""

from __future__ import annotations

from typing import Final

from scheduler.core.state import State
from scheduler.model import Grant, Running, events
from tangram.action import CELLS, CORES, Action

MOST_REFUSALS: Final = 5
"""Refused tries that are repeated; each is one more than the number of its grant says, also after a restart."""


def may_wait_again(action: Action, grant: Grant) -> bool:
    """Say whether an action goes back to the queue when an outside API refuses it under this grant."""
    return only_calls(action) and action.idempotent and grant.attempt <= MOST_REFUSALS


def only_calls(action: Action) -> bool:
    """Say whether an action draws on quotas and holds nothing else."""
    return bool(action.cost.quotas) and action.environment is None and not {CORES, CELLS} & set(action.cost.amounts)


def note_sent(state: State, event: events.Sent, now: float) -> None:
    """Have the accounts of a running action know when its request really went out."""
    running = state.running.get(event.id)
    if running is None or running.grant.attempt != event.attempt:
        return
    planned_s, running.sent_at = running.goes_at, max(running.goes_at, min(event.at, now))
    for account, requests, _ in state.draws(running.waiting.action):
        account.went_out(planned_s, running.sent_at, requests)


def note_answer(state: State, running: Running, event: events.Finished, now: float) -> None:
    """Have the accounts of an action learn from how it ended. Its places are given back apart from this."""
    answer = event.answer
    for account, requests, tokens in state.draws(running.waiting.action):
        if answer is not None and answer.refuses:
            account.throttle.refused(running.granted_at, now, answer.retry_after_s)
        elif event.status == "succeeded" and (answer is None or answer.status < 500):
            account.throttle.succeeded(running.granted_at, now)
        if answer is not None:
            # A refusal that names no cost had none; of any other answer what was declared is the best that is known.
            spent = answer.tokens if answer.tokens is not None else 0 if answer.refuses else tokens
            account.charge(max(0, answer.requests - requests), spent - tokens, now)
