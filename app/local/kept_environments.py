"""Ends what a killed worker has left on this machine for the next one.

The environments of a CPU worker outlive it; `workers/cpu/handover/protocol.py` says how. The process that keeps them listens on a
socket in the folder of the worker's sandbox. Only the user of the worker can reach it.

Rules: the standard library only; the fork server imports this file.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

SOCKET = "kept"
"""The name of the socket in the folder of a sandbox."""

END = b'{"end": true}'
END_LIMIT_S = 15.0


@contextlib.contextmanager
def address(folder: Path | str) -> Iterator[str]:
    """Give the path of the socket in a folder, which is short however long the path of the folder is: the kernel allows 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def connect(folder: Path) -> socket.socket | None:
    """Return a connection to the process that keeps the environments of a sandbox; None if there is none."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(folder) as path:
            channel.connect(path)
    except OSError:
        channel.close()
        return None
    return channel


def end_kept(state_dir: Path) -> None:
    """End the environments that workers with this state folder have left for successors, and return once they have ended."""
    _end(path.parent for path in (state_dir / "environments").glob(f"*/{SOCKET}"))


def folder_of(state_dir: Path, node: str, shard: int, shards: int) -> Path:
    """Return the folder of a node's environments. It has one in each shard.

    Environments that the node has left in other shards are ended. The scheduler of this shard does not know them.
    """
    folders = {other: state_dir / "environments" / (f"{node}+{other}" if other else node) for other in {*range(shards), shard}}
    _end(folder for other, folder in folders.items() if other != shard)
    return folders[shard]


def _end(folders: Iterable[Path]) -> None:
    channels = [channel for folder in folders if (channel := connect(folder)) is not None]
    for channel in channels:
        with channel, contextlib.suppress(OSError):
            channel.send(END)
            # It ends with the process that keeps them.
            select.select([channel], [], [], END_LIMIT_S)
