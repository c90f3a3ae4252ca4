"""Networks: one to Redis that can be cut, one on which RabbitMQ seems to lack memory, and TLS before a server."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path


class Network:
    """What lies between a scheduler and a server. After a cut nothing passes on the connections of before, not even their end."""

    def __init__(self, path: Path, server: Path) -> None:
        self.path, self.url = path, f"redis+socket://{path}?virtual_host=0"
        self._server = server
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        self._begin(listener)

    def _begin(self, listener: socket.socket) -> None:
        self._listener, self._sockets, self._cuts = listener, list[socket.socket](), 0
        listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _reach(self) -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        far.connect(str(self._server))
        return far

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], self._reach()
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


class BlockingNetwork(Network):
    """What lies before the RabbitMQ server of this machine. Unless it `flows`, the server seems to do what it does without memory.

    It tells a connection that has published (method 60.40 of AMQP) that it is blocked (10.60), and reads no more of it, not even its end,
    until it says that it goes on (10.61). `blocked` counts these connections.
    """

    def __init__(self, port: int) -> None:
        self._far, self.flows, self.blocked = port, threading.Event(), 0
        self.flows.set()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._begin(listener)

    def _reach(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._far))

    def _carry(self, source: socket.socket, target: socket.socket, cuts: int) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if not self.flows.is_set() and b"\0\x3c\0\x28" in data:
                    self.blocked += 1
                    source.sendall(b"\1\0\0\0\0\0\x0b\0\x0a\0\x3c\6memory\xce")
                    self.flows.wait()
                    source.sendall(b"\1\0\0\0\0\0\4\0\x0a\0\x3d\xce")
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def tls_before(port: int, folder: Path) -> Iterator[int]:
    """Yield a port where a server with the certificate in a folder takes TLS, and hands what it hears to the server at `port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "hub.pem", folder / "hub.key")
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    async def serve() -> None:
        over, server = asyncio.Event(), await asyncio.start_server(join, "127.0.0.1", 0, ssl=context)
        begun.set_result((asyncio.get_running_loop(), over, server.sockets[0].getsockname()[1]))
        await over.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    loop, over, own_port = begun.result(60)
    try:
        yield own_port
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
