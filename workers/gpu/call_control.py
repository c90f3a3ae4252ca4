"""What a caller sets for a running call besides its input."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from workers.gpu.errors import BadInput, CallCancelled

LONGEST_WORK_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class CallControl:
    """How long a call of the stub takes, and the event that ends a call early.

    `work_s` is for the stub alone, so that a trace can be replayed without a model. Once `cancelled` is set, the call ends with
    `CallCancelled`: the stub at once, a model after its batch.
    """

    work_s: float = 0.0
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if not 0.0 <= self.work_s <= LONGEST_WORK_S:
            raise BadInput(f"work_s: must be between 0 and {LONGEST_WORK_S:g} seconds, not {self.work_s!r}")

    def check(self) -> None:
        """Raise `CallCancelled` if the call is to end."""
        if self.cancelled.is_set():
            raise CallCancelled("the call was cancelled")
