"""The worker's side of one keeper: messages out, events in, nothing decided."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from workers.cpu.process.tree import Identity

MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Spawned:
    """The shell was forked."""

    shell: int
    keeper: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The shell could not be run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The shell has ended; `code` is 128 + n after signal n."""

    shell: int
    code: int
    max_rss_mb: float


@dataclass(frozen=True, slots=True)
class Gone:
    """A kill is over; `left` are processes that did not die."""

    max_rss_mb: float
    left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HungUp:
    """The keeper is gone."""


Event = Spawned | Refused | Exited | Gone | HungUp


class KeeperLink:
    """A connection to one keeper. One thread at a time reads events; `hang_up` may come from any."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        channel.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is an event."""
        return self._channel.fileno()

    def spawn(self, argv: Sequence[str], environment: Mapping[str, str], folders: tuple[str, str], limits: Mapping[str, int]) -> None:
        """Ask for a shell in the first of `folders`, or the second when that is gone."""
        cwd, home = folders
        self._say(do="spawn", argv=list(argv), env=dict(environment), cwd=cwd, home=home, limits=dict(limits))

    def kill(self, spared: Collection[Identity], grace_s: float) -> None:
        """Ask that all processes end but `spared` ones and their descendants; the answer is `Gone`."""
        self._say(do="kill", spared=[list(identity) for identity in spared], grace_s=grace_s)

    def _say(self, **message: object) -> None:
        try:
            self._channel.send(json.dumps(message).encode())
        except (ConnectionError, BrokenPipeError):
            return  # The end of the channel follows as an event.

    def events(self) -> Iterator[Event]:
        """Yield the events that have come; `HungUp` is the last one."""
        while True:
            try:
                message = self._channel.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                message = b""
            if not message:
                yield HungUp()
                return
            yield _parse(json.loads(message))

    def hang_up(self) -> None:
        """Tell the keeper to end everything below it."""
        try:
            self._channel.shutdown(socket.SHUT_WR)
        except OSError:
            return  # It has gone already.

    def has_ended(self, timeout_s: float) -> bool:
        """Wait until the keeper is gone, for `timeout_s` at most; takes no events."""
        poller = select.poll()
        poller.register(self._channel, 0)
        return bool(poller.poll(timeout_s * 1000))

    def close(self) -> None:
        """Give the descriptor back."""
        self._channel.close()


def _parse(said: dict[str, object]) -> Event:
    match said:
        case {"event": "spawned", "pid": int(shell), "keeper": int(keeper)}:
            return Spawned(shell, keeper)
        case {"event": "refused", "reason": str(reason)}:
            return Refused(reason)
        case {"event": "exited", "pid": int(shell), "code": int(code), "max_rss_mb": float(rss_mb)}:
            return Exited(shell, code, rss_mb)
        case {"event": "gone", "max_rss_mb": float(rss_mb), "left": list(left)}:
            return Gone(rss_mb, tuple(left))
    raise ValueError(f"no event of a keeper: {said}")
