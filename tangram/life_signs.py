"""Signs of life of clients: a trainer that was killed leaves nothing behind for long.

Each client has a key in the result store, which it sets anew every `SIGN_S` seconds. The key holds the milliseconds for which it was
made to last; what is left of them tells when it was set, by the store's own clock. A scheduler that restarts thus knows at once for how
long a client has been silent. The key of a client that is gone stays until it expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from redis import Redis

from tangram.wire import CLIENT_KEY_PREFIX

SIGN_S: Final = 2.0
"""Seconds between two signs of life of a client."""

LONGEST_SILENCE_S: Final = 24 * 3600
"""Silence after which the store forgets a client."""

_CLIENTS_AT_ONCE = 500


def give_sign(store: Redis, client_id: str) -> None:
    """Say that a client is alive. Raises what redis-py raises."""
    lasts_ms = LONGEST_SILENCE_S * 1000
    store.set(CLIENT_KEY_PREFIX + client_id, lasts_ms, px=lasts_ms)


def silences(store: Redis, client_ids: Sequence[str]) -> dict[str, float | None]:
    """Return for how many seconds clients have been silent, None for those that the store does not know.

    Raises what redis-py raises.
    """
    found: dict[str, float | None] = {}
    for start in range(0, len(client_ids), _CLIENTS_AT_ONCE):
        some = client_ids[start : start + _CLIENTS_AT_ONCE]
        with store.pipeline(transaction=False) as pipe:
            for client_id in some:
                pipe.get(CLIENT_KEY_PREFIX + client_id)
                pipe.pttl(CLIENT_KEY_PREFIX + client_id)
            answers = pipe.execute()
        for client_id, lasted_ms, left_ms in zip(some, answers[::2], answers[1::2], strict=True):
            known = isinstance(lasted_ms, bytes) and lasted_ms.isdigit() and left_ms >= 0
            found[client_id] = (int(lasted_ms) - left_ms) / 1000.0 if known else None
    return found
