"""A small network beside the host: one machine of several addresses that answers, in a network namespace of its own.

`python -m tests.containers.lan PORT…` is that machine: it greets on each TCP port and prints where every UDP packet to
port 53 came from.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from workers.cpu.docker.network import NOBODY

ROOT = Path(__file__).parents[2]
GREETING = "hello"
PORTS = (8000, 8001)


def lacking() -> str:
    """Return what making such a network lacks here; nothing where it can be made."""
    missing = [program for program in ("ip", "iptables", "unshare", "setpriv") if shutil.which(program) is None]
    if missing:
        return f"there is no program {missing[0]}"
    return "" if os.geteuid() == 0 else "making networks needs root"


@dataclass(frozen=True)
class Lan:
    """Addresses: of the host, two of the machine, and a link-local one of it, as cloud machines have for their credentials."""

    host: str
    one: str
    two: str
    link_local: str
    packets: list[str]


@contextmanager
def lan() -> Iterator[Lan]:
    """Give such a network as long as the block lasts."""
    number = os.getpid() % 250 + 1
    name, outside, inside = f"tgt{os.getpid()}", f"tgo{os.getpid()}", f"tgi{os.getpid()}"
    made = Lan(f"198.18.{number}.1", f"198.18.{number}.2", f"198.18.{number}.3", f"169.254.{number}.254", [])
    within = f"ip -n {name}"
    try:
        for command in (
            f"ip netns add {name}",
            f"ip link add {outside} type veth peer name {inside} netns {name}",
            f"ip addr add {made.host}/24 dev {outside}",
            f"ip link set {outside} up",
            f"{within} link set lo up",
            *(f"{within} addr add {each} dev {inside}" for each in (f"{made.one}/24", f"{made.two}/24", made.link_local, NOBODY)),
            f"{within} link set {inside} up",
            *(f"ip route replace {each} dev {outside}" for each in (made.link_local, NOBODY)),
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        argv = ["ip", "netns", "exec", name, sys.executable, "-m", "tests.containers.lan", *map(str, PORTS)]
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            reader = threading.Thread(target=lambda: made.packets.extend(process.stdout or ()), daemon=True)
            reader.start()
            yield made
        finally:
            process.kill()
            process.wait()
    finally:
        subprocess.run(["ip", "link", "del", outside], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def greeter(address: str, port: int = 0) -> Iterator[int]:
    """Greet on an address of the host as long as the block lasts; give the port."""
    with socket.create_server((address, port)) as server:
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                _greet(server)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            with socket.create_connection(server.getsockname()):
                pass
            thread.join()


def _greet(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(f"{GREETING}\n".encode())


def main() -> None:
    chosen = selectors.DefaultSelector()
    for port in map(int, sys.argv[1:]):
        chosen.register(socket.create_server(("0.0.0.0", port)), selectors.EVENT_READ)
    packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    packets.bind(("0.0.0.0", 53))
    chosen.register(packets, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in chosen.select():
            if key.fileobj is packets:
                print(packets.recvfrom(2048)[1][0], flush=True)
            else:
                assert isinstance(key.fileobj, socket.socket)
                _greet(key.fileobj)


if __name__ == "__main__":
    main()
