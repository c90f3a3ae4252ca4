"""What tools read in the result store: the document of the active scheduler, and how long clients have been silent."""

from __future__ import annotations

import json
from typing import Any, Final

from redis import Redis, RedisError, ResponseError

from app.journal.overview import Present
from tangram.life_signs import silences
from tangram.wire import SCHEDULER_KEY

SHOWN_TTL_S: Final = 60
"""Seconds for which a scheduler that has died is still shown."""

_TRIED_KEY: Final = "tangram-tried"


def problem_of(store: Redis) -> str:
    """Return in one line what a store says that answers and takes nothing, such as one without memory. Raises other `RedisError`s."""
    try:
        store.set(_TRIED_KEY, b"", px=1)
    except ResponseError as error:
        return f"the result store takes nothing: {error}"
    return ""


def silences_of(store: Redis, present: Present) -> dict[str, float | None]:
    """Return for how many seconds the clients with environments have been silent; of none where the store does not answer."""
    try:
        return silences(store, sorted({row.client for row in present.clients}))
    except (RedisError, OSError):
        return {}


def read_shown(store: Redis) -> dict[str, Any] | None:
    """Return the scheduler's document (`scheduler/live/document.py`); None where none shows itself. Raises `RedisError`.

    `shown_ago_s` says how old it is by the clock of the result store, so that clocks of hosts do not matter.
    """
    with store.pipeline(transaction=False) as pipe:  # a store without memory refuses transactions
        pipe.get(SCHEDULER_KEY)
        pipe.pttl(SCHEDULER_KEY)
        shown, left_ms = pipe.execute()
    if not isinstance(shown, bytes | str):
        return None
    return {**json.loads(shown), "shown_ago_s": max(0.0, SHOWN_TTL_S - left_ms / 1000)}
