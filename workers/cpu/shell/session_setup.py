"""What a session is made of."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from workers.cpu.shell.backend import Backends
from workers.cpu.shell.dialect import Dialect, ProtocolFolder
from workers.cpu.shell.output import Drain
from workers.cpu.shell.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSetup:
    """What a session is made of; the same for all sessions of an environment.

    `control_folder` holds the folders of sessions, and shells see it as `control_inside`; they start in `home`. Their states are in
    `state_folder`, which they see as `state_inside`.
    """

    backends: Backends
    drain: Drain
    dialect: Dialect
    control_folder: str
    control_inside: str
    state_folder: str
    state_inside: str
    home: str
    start_timeout_s: float
    record: Record
    """What a successor of this worker is told of the sessions, where they may have one."""

    def control(self, name: str = "") -> ProtocolFolder:
        """Return the protocol folder of one more session, or that of a `name`."""
        name = name or secrets.token_hex(8)
        folder, inside = f"{self.control_folder}/{name}", f"{self.control_inside}/{name}"
        return ProtocolFolder(folder, inside, f"{self.state_folder}/{name}", f"{self.state_inside}/{name}")
