"""What the store knows of the end of an action: a result that its worker has not reported yet, and which tries count no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scheduler.model.events import StoredEnd
from scheduler.model.lifecycle import ACTION, End
from tangram.action import KINDS
from tangram.decode import read_meta, stored_value
from tangram.errors import ActionError
from tangram.wire import CLAIM_TTL_S, DISOWNED, claim_key

_ENDS: Mapping[str, End] = {end: end for end in ACTION.ends}


def stored_end(action_id: str, kind: str, raw: object) -> StoredEnd | None:
    """Return what the store says under the key of an action of `kind`; None where that is no end."""
    if not isinstance(raw, bytes):
        return None
    try:
        meta = read_meta(raw)
        if not meta.final:
            return None
        stored = stored_value(kind, meta)
    except ActionError as error:
        return StoredEnd(id=action_id, status=_ENDS[error.status], reason=error.reason, cause=error.cause)
    if kind not in KINDS or not isinstance(stored, Mapping):
        return StoredEnd(id=action_id, status="succeeded")
    act, value = stored.get("act"), stored.get("value")
    return StoredEnd(
        id=action_id,
        status="timed_out" if stored.get("status") == "timed_out" else "succeeded",
        reason=str(stored.get("reason", "")),
        cause=str(stored.get("cause", "")),
        background_s=_seconds(act, "background_s"),
        execution_s=_seconds(act, "execution_s"),
        cpu_s=_seconds(value, "cpu_s"),
    )


def _seconds(words: object, name: str) -> float:
    """Return a number of seconds of an object, 0 where it has none of that name."""
    value = words.get(name) if isinstance(words, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and 0 <= value < float("inf") else 0.0


def disown(pipe: Any, tries: Iterable[tuple[str, int]]) -> None:
    """Have the claims of these tries, each an action and an attempt, say that the scheduler has given them up."""
    for one in tries:
        # A claim that is there lasts as long as its action may run; one that comes later finds the key taken.
        pipe.set(claim_key(*one), DISOWNED, xx=True, keepttl=True)
        pipe.set(claim_key(*one), DISOWNED, nx=True, ex=CLAIM_TTL_S)


def withdraw(store: Any, one: tuple[str, int]) -> bool:
    """Disown a try that nobody has claimed; return whether that was so."""
    return bool(store.set(claim_key(*one), DISOWNED, nx=True, ex=CLAIM_TTL_S))
