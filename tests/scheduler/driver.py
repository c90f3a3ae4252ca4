"""A core with its command executor and its heartbeats, as the live service has them, between wires that go nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.core import Core
from scheduler.live.command_executor import CommandExecutor
from scheduler.live.entries import Entry
from scheduler.live.heartbeats import Heartbeats
from scheduler.model import Limits, QuotaSpec, events
from scheduler.model.commands import Command
from scheduler.policies import make_policy


@dataclass
class Wires:
    """Stands for the broker, the store and the journal: keeps what is sent, and which tries are worth nothing any more."""

    sent: list[tuple[str, int]] = field(default_factory=list)
    disowned: list[tuple[str, int]] = field(default_factory=list)
    controls: list[tuple[str, str]] = field(default_factory=list)
    lost_connections: int = 0
    caught_up: bool = True
    ends_to_store: int = 0

    def send_action(self, node: str, message: str, header: dict[str, Any]) -> None:
        self.sent.append((message, header["attempt"]))

    def send_control(self, node: str, task: str, arguments: dict[str, Any]) -> None:
        self.controls.append((task, str(arguments.get("service"))))

    def stored_ends(self, kinds: dict[str, str]) -> list[events.StoredEnd]:
        return []

    def disown(self, action_id: str, attempt: int) -> None:
        self.disowned.append((action_id, attempt))

    def store_end(self, *end: object) -> None:
        pass

    def write(self, entries: list[Entry]) -> None:
        pass


class Driver:
    """Hands events to a core and carries out what follows; `out` is all of that."""

    def __init__(
        self, quotas: Sequence[QuotaSpec] = (), now: float = 0.0, policy: str = "elastic", wires: Wires | None = None, **limits: Any
    ) -> None:
        self.core = Core(make_policy(policy), quotas=quotas, limits=Limits(**limits))
        self.wires: Any = wires or Wires()
        self.out: list[Command] = []
        self.executor = CommandExecutor(self.core, self.wires, self.wires, 1)
        self.heartbeats = Heartbeats(self.core, self.wires, self.executor, self.handle, now)

    def handle(self, event: events.Event, now: float) -> None:
        for command in self.core.handle(event, now):
            self.out.append(command)
            self.executor.carry_out(command, now)
