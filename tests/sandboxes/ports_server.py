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


def serve(connection: socket.socket, word: bytes) -> None:
    asked = b""
    while b"\r\n\r\n" not in asked:
        asked += connection.recv(65536)
    method, path, _ = asked.split(b" ", 2)
    head, _, body = asked.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while path != b"/early" and len(body) < sum(lengths):
        body += connection.recv(65536)
    match path.decode():
        case "/garbage":
            connection.sendall(b"SSH-2.0-server\r\n\r\n")
        case "/upgrade":
            connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        case "/silent":
            pass
        case "/cut":
            connection.sendall(OK + b"Content-Length: 100\r\n\r\nhello")
        case "/head":
            connection.sendall(OK + b"X: " + b"a" * 1_000_000)
        case "/endless":
            connection.sendall(OK + b"\r\n")
            while True:
                connection.sendall(bytes(65536))
        case "/never":
            time.sleep(600)
        case "/slowly":
            connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
            while True:
                connection.sendall(b"1\r\nx\r\n")
                time.sleep(0.01)
        case "/announcing":
            while True:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        case "/crumbs":
            connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
            while True:
                connection.sendall(b"1\r\nx\r\n" * 1000)
        case "/status":
            connection.sendall(b"HTTP/1.1 799 Odd\r\nContent-Length: 0\r\n\r\n")
        case "/control":
            connection.sendall(OK + b"X: a\x01b\r\nContent-Length: 0\r\n\r\n")
        case "/early":
            connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nstop!")
            connection.shutdown(socket.SHUT_RD)
        case "/continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + OK + b"Content-Length: 2\r\n\r\nok")
        case _:
            connection.sendall(OK + b"Content-Type: text/plain\r\nSet-Cookie: a\r\nSet-Cookie: b\r\n\r\n" + word + b" " + method)
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
