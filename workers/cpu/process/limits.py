"""Resource limits of the shells of process environments, as values for `setrlimit`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """What every process of an environment is limited to; None leaves a limit as the worker has it.

    `processes`, in a session that bubblewrap sets apart, bounds that session, by default to 512 (see `isolation.py`). Else
    it counts *all* processes of the operating-system user on this machine, the worker's own too, and does not hold for
    root: hence unset by default. Core dumps are always off.
    """

    open_files: int | None = 4096
    file_size_mb: int | None = 16_384
    processes: int | None = None

    def as_rlimits(self) -> dict[str, int]:
        """Return the limits by the name of their constant in `resource`."""
        wanted = {
            "RLIMIT_CORE": 0,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_FSIZE": None if self.file_size_mb is None else self.file_size_mb << 20,
            "RLIMIT_NPROC": self.processes,
        }
        return {name: value for name, value in wanted.items() if value is not None}
