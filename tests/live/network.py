"""A network that can be cut, between a scheduler and a Redis server."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path


class Network:
    """What lies between a scheduler and a server. After a cut nothing passes on the connections of before, not even their end."""

    def __init__(self, path: Path, server: Path) -> None:
        self.path, self.url = path, f"redis+socket://{path}?virtual_host=0"
        self._server, self._sockets, self._cuts = server, list[socket.socket](), 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
                far.connect(str(self._server))
                self._sockets += (near, far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(*ends, self._cuts), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, cuts: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._cuts == cuts:
                    target.sendall(data)
            if self._cuts == cuts:
                target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Have nothing pass on the connections of now."""
        self._cuts += 1

    def cut_unknown_to_the_server(self) -> None:
        """Have nothing pass on the connections of now. Their clients find them ended."""
        self.cut()
        for near in self._sockets[::2]:
            near.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._sockets):
            each.close()
