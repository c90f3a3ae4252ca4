"""What memory a node offers, and whether it is granted by action or booked by limits: by `TANGRAM_MEMORY`, and by what is possible here.

| `TANGRAM_MEMORY` | environments can be paused here                             | they cannot                   |
|------------------|-------------------------------------------------------------|-------------------------------|
| `auto`           | by action, unless `TANGRAM_MEMORY_MB` is more than is there | by limits, which is logged    |
| `elastic`        | by action                                                   | by limits, which is a warning |
| `fixed`          | by limits                                                   | by limits                     |
"""

from __future__ import annotations

import logging
from typing import Any

import psutil

from tangram.settings import Settings
from tangram.wire import WireNode
from workers.cpu.abstract import Sandbox
from workers.cpu.memory.pause_trial import Memory
from workers.memory import MIB, for_environments_mb, usable_mb


class MemoryOffer:
    """The memory of a node. `memory_mb` are offered; `memory` is what its sandbox is to do."""

    def __init__(self, settings: Settings) -> None:
        there_mb = psutil.virtual_memory().total // MIB
        self.memory_mb = settings.memory_mb or there_mb
        # Containers are not in the worker's group, but beside it.
        self._there_mb = usable_mb() if settings.sandbox == "process" else there_mb
        self._too_much = ""
        if settings.memory == "auto" and settings.memory_mb is not None and settings.memory_mb > self._there_mb:
            self._too_much = f"TANGRAM_MEMORY_MB={settings.memory_mb} is more than the {self._there_mb} MB that are there"
        self.memory: Memory = "fixed" if settings.memory == "fixed" or self._too_much else "elastic"
        self.level = logging.WARNING if settings.memory == "elastic" else logging.INFO
        """How bad it is if limits are booked."""

    def declare(self, description: WireNode, sandbox: Sandbox) -> str:
        """Declare that memory is granted as it is used, if it is. Return why limits are booked; nothing if they are not, or are to be.

        What is granted is used, so it must be there.
        """
        if self.memory == "fixed":
            return self._too_much
        if not sandbox.memory_problem:
            offered_mb = min(description["memory_mb"], for_environments_mb(self._there_mb))
            description["grants_memory"], description["memory_mb"] = True, offered_mb
        return sandbox.memory_problem


def allowed_now(sandbox: Sandbox) -> dict[str, Any]:
    """Return what a beat says of the memory of all environments; nothing if none was granted any."""
    allowances = (environment.allowance for environment in sandbox.environments())
    found = {allowance.environment: now for allowance in allowances if allowance is not None and (now := allowance.now()) is not None}
    return {"allowed": found} if found else {}
