"""The live scheduler's interface to the broker: incoming and outgoing messages. Implemented in `app/broker/transport.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from scheduler.live.entries import UnpublishedEnd
from scheduler.model.events import StoredEnd
from tangram.wire import BLOB_TTL_S, WireLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One message: an action with its id and whole `message`, or the decoded `body` of another kind of message."""

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
        """Return the arrived messages, after waiting at most `timeout_s` for the first message."""

    def send_action(self, node: str, message: str, grant: Mapping[str, Any]) -> None:
        """Send a stored message on to a node, under the same task id, with the header `grant`."""

    def send_control(self, node: str, task: str, arguments: Mapping[str, Any]) -> None:
        """Have a node run one of its control tasks."""

    def store_end(self, end: UnpublishedEnd) -> None:
        """Store the result of an action that ends without a worker."""

    def tell_lost(self, action_id: str) -> None:
        """Store that the result of an ended action is lost, unless the store has a result."""

    def stored_ends(self, kinds: Mapping[str, str], give_up: Mapping[str, int] = MappingProxyType({})) -> list[StoredEnd] | None:
        """Return the ends of the actions in `kinds`, kinds by id, whose workers have stored a result.

        If the store does not answer, return None.
        The tries in `give_up`, attempts by id, are disowned at the same moment: a worker that has stored no result of one yet never does.
        """

    def claimed(self, tries: Mapping[str, int]) -> set[str] | None:
        """Return those of these tries, attempts by id, that a worker has claimed. If the store does not answer, return None."""

    def withdraw(self, action_id: str, attempt: int) -> bool:
        """Disown a try that no worker has claimed; return False if one has, or if the store does not answer."""

    def silences(self, clients: Sequence[str]) -> Mapping[str, float | None] | None:
        """Return each client's seconds since its last sign of life; None for a client without a known sign.

        If the store does not answer, return None.
        """

    def keep_blobs(self, keys: Sequence[str], for_s: int = BLOB_TTL_S) -> None:
        """Keep blobs for `for_s` from now, or drop them with 0. If the store does not answer, they live on as they did."""

    def flush(self, received: Sequence[Received] = ()) -> None:
        """Send buffered messages, and tell the broker that those received need not come again."""

    def show(self, figures: Mapping[str, Any]) -> None:
        """Show the scheduler's figures to tools."""

    def exchange(self, load: WireLoad) -> Sequence[WireLoad] | None:
        """Say what this shard carries, and return what each of the others last said. If the store does not answer, return None."""

    @property
    def ends_to_store(self) -> int:
        """Number of results still to be stored. These are the latest, since results are stored in order."""

    @property
    def caught_up(self) -> bool:
        """Whether the last `receive` brought all waiting messages."""

    @property
    def lost_connections(self) -> int:
        """How often the broker went away. Messages sent just before may be lost."""
