"""The result of an action as the result store has it, for those who have not submitted it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from app.gateway.context import Gateway
from tangram.blobs import Blobs
from tangram.decode import decode, read_meta
from tangram.wire import RESULT_KEY_PREFIX


@dataclass(frozen=True, slots=True)
class Stored:
    """The result of an action that has ended, which may be None."""

    value: Any


async def stored_result(gateway: Gateway, kind: str, action: str) -> Stored | None:
    """Return the result of an action of a kind; None where it has none yet, or none any more. Raises as `Handle.result`."""
    raw = await gateway.store.get(RESULT_KEY_PREFIX + action)
    if not isinstance(raw, bytes):
        return None
    meta = read_meta(raw)
    if not meta.final:
        return None
    return Stored(await asyncio.to_thread(decode, kind, meta, time.monotonic(), Blobs(gateway.blob_store)))
