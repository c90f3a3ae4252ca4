"""The broker as the live scheduler sees it: what arrives, and what can be sent. Implemented in `app/broker/transport.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from scheduler.model.events import StoredEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One message: an action with its id and whole `message`, or an already decoded `body` of the other kinds."""

    sort: Literal["action", "events", "control"]
    id: str = ""
    task: str = ""
    header: Mapping[str, Any] | None = None
    message: str = ""
    body: Any = None
    tag: Any = None


class Transport(Protocol):
    """The broker, as the service needs it. Sending is buffered until `flush`."""

    def receive(self, timeout_s: float) -> list[Received]:
        """Return what has arrived, after waiting at most `timeout_s` for the first message."""

    def acknowledge(self, received: Sequence[Received]) -> None:
        """Tell the broker that these need not come again."""

    def send_action(self, node: str, message: str, grant: Mapping[str, Any]) -> None:
        """Send a stored message on to a node, under the same task id, with the header `grant`."""

    def send_control(self, node: str, task: str, arguments: Mapping[str, Any]) -> None:
        """Have a node run one of its control tasks."""

    def store_end(self, action_id: str, message: str, status: str, reason: str, environment_lost_on: str = "") -> None:
        """Store the result of an action that ends without a worker, perhaps because its environment was lost on a node."""

    def stored_ends(self, kinds: Mapping[str, str]) -> list[StoredEnd]:
        """Return the ends of those of these actions, kinds by id, whose workers have stored a result."""

    def disown(self, action_id: str, attempt: int) -> None:
        """Let the worker that has claimed this try know that its result does not count any more."""

    def silences(self, clients: Sequence[str]) -> Mapping[str, float | None] | None:
        """Return for how many seconds each of these clients has given no sign of life, None for one of which none is known.

        While the store does not answer, nothing is known of anybody, and None is returned.
        """

    def keep_blobs(self, keys: Sequence[str]) -> None:
        """Have blobs live for `BLOB_TTL_S` from now on; tried again with the next ones where the store does not answer."""

    def flush(self) -> None:
        """Send what was buffered."""

    def show(self, figures: Mapping[str, Any]) -> None:
        """Let tools see how the scheduler is doing."""

    @property
    def ends_to_store(self) -> int:
        """How many results are still to be stored; those are the latest, as they are stored in the order in which they came."""

    @property
    def caught_up(self) -> bool:
        """Whether the last `receive` brought all that there was."""

    @property
    def lost_connections(self) -> int:
        """How often the broker went away; what was sent just before may be lost."""
