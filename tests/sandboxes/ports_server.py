"""A server for environments that answers as its path says, mostly wrongly.

Arguments: an address, a port or 0, the file that gets its port once it listens, and a word that tells it from others. Sockets alone,
no HTTP.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from pathlib import Path

OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "/garbage": b"SSH-2.0-server\r\n\r\n",
    "/upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "/silent": b"",
    "/cut": OK + b"Content-Length: 100\r\n\r\nhello",
    "/head": OK + b"X: " + b"a" * 1_000_000,
    "/status": b"HTTP/1.1 799 Odd\r\nContent-Length: 0\r\n\r\n",
    "/control": OK + b"X: a\x01b\r\nContent-Length: 0\r\n\r\n",
    "/early": b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nstop!",
    "/continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + OK + b"Content-Length: 2\r\n\r\nok",
}
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "/endless": (OK + b"\r\n", bytes(65536), 0.0),
    "/slowly": (CHUNKED, b"1\r\nx\r\n", 0.01),
    "/crumbs": (CHUNKED, b"1\r\nx\r\n" * 1000, 0.0),
    "/announcing": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0.0),
    "/never": (b"", b"", 600.0),
}
"""What comes first, what comes again and again, and how many seconds after."""


def serve(connection: socket.socket, word: bytes) -> None:
    asked = b""
    while b"\r\n\r\n" not in asked:
        asked += connection.recv(65536)
    method, path, _ = asked.split(b" ", 2)
    head, _, body = asked.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while path != b"/early" and len(body) < sum(lengths):
        body += connection.recv(65536)
    usual = OK + b"Content-Type: text/plain\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r\n" + word + b" " + method
    first, again, pause_s = ENDLESS.get(path.decode(), (ANSWERS.get(path.decode(), usual), b"", 0.0))
    connection.sendall(first)
    if path == b"/early":
        connection.shutdown(socket.SHUT_RD)
    while path.decode() in ENDLESS:
        connection.sendall(again)
        time.sleep(pause_s)
    connection.close()


def answer(connection: socket.socket, word: bytes) -> None:
    """Answer one request, unless its sender is gone."""
    with contextlib.suppress(OSError):
        serve(connection, word)


def main(address: str, port: str, ready: str, word: str) -> None:
    listening = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if ":" in address:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listening.bind((address, int(port)))
    listening.listen()
    draft = Path(f"{ready}.draft")
    draft.write_text(f"{listening.getsockname()[1]}\n")
    draft.rename(ready)
    while True:
        threading.Thread(target=answer, args=(listening.accept()[0], word.encode()), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
