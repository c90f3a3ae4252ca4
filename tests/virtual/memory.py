"""The memory of environments in virtual time: the worker's own `Allowance` above a kernel that is made up.

A program that wants more than its bound gets what is there, and stands still with all others of its environment once these are frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.cpu.memory.allowance import Allowance
from workers.cpu.memory.controls import Controls
from workers.memory import MIB


class VirtualWatcher:
    """Looks at an allowance when that is asked for, and has no thread. `changed` hears of each change."""

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self.on_wanted: Callable[[dict[str, Any]], None] = lambda report: None
        self._changed = changed

    def watch(self, allowance: Allowance) -> None:
        """Nothing grows by itself, so there is nothing to watch."""

    def forget(self, allowance: Allowance) -> None:
        """See `watch`."""

    def look_within(self, allowance: Allowance, patience_s: float) -> None:
        """Look at once."""
        self._changed()
        allowance.look()


class VirtualControls(Controls):
    """The control files of one environment, whose programs would use `wanted_mb`. It goes on with what `left` an earlier worker."""

    def __init__(self, limit_mb: int, frozen: Callable[[bool], None] = lambda frozen: None, left: VirtualControls | None = None) -> None:
        super().__init__("/nonexistent")
        self.wanted_mb = left.wanted_mb if left is not None else 0
        self._remembered_mb = left._remembered_mb if left is not None else None
        self._most_bytes = limit_mb * MIB
        self._frozen = frozen

    @property
    def thawing(self) -> tuple[str, str]:
        raise NotImplementedError

    def remember(self, allowance_mb: int) -> None:
        self._remembered_mb = allowance_mb

    def remembered_mb(self) -> int:
        if self._remembered_mb is None:
            raise FileNotFoundError
        return self._remembered_mb

    def _cache(self) -> int:
        return 0

    def used(self) -> int:
        return min(self.wanted_mb * MIB, self._most_bytes)

    def meets(self) -> bytes:
        return b""

    def bound(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def unbound(self, limit_bytes: int) -> None:
        self._most_bytes = limit_bytes

    def freeze(self) -> None:
        self._frozen(True)

    def thaw(self) -> None:
        self._frozen(False)

    def restart_peak(self) -> None:
        pass

    def peak(self) -> None:
        return None
