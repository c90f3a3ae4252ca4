"""Resource limits of the shells of process environments, as values for `setrlimit`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tangram.errors import InvalidAction


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What every process of an environment is limited to; None leaves a limit as the worker has it.

    `processes`, in a session that bubblewrap sets apart, bounds that session, by default to 512 (see `isolation.py`). Else
    it counts *all* processes of the operating-system user on this machine, the worker's own too, and does not hold for
    root: hence unset by default. `address_space="memory_mb"` turns the environment's `memory_mb` into
    RLIMIT_AS of each process; that limits virtual memory, which many runtimes reserve without using, so it is off by
    default. Core dumps are always off.
    """

    open_files: int | None = 4096
    file_size_mb: int | None = 16_384
    processes: int | None = None
    address_space: Literal["unlimited", "memory_mb"] = "unlimited"

    def __post_init__(self) -> None:
        """Refuse limits below 1."""
        for name in ("open_files", "file_size_mb", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidAction(name, f"must be at least 1, not {value}")

    def as_rlimits(self, memory_mb: int | None) -> dict[str, int]:
        """Return the limits by the name of their constant in `resource`."""
        wanted = {
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_FSIZE": None if self.file_size_mb is None else self.file_size_mb << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_AS": memory_mb << 20 if self.address_space == "memory_mb" and memory_mb else None,
        }
        return {name: value for name, value in wanted.items() if value is not None}
