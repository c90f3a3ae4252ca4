"""A network of its own for clients that vanish: their packets can be dropped, so that no end of a connection reaches the other one."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Network:
    """A namespace `name` whose programs reach this machine at `host`, from `client`."""

    name: str
    host: str
    client: str

    def argv(self, *words: str) -> list[str]:
        """Return what runs a program there."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Drop all packets that come in or go out."""
        for chain in ("INPUT", "OUTPUT"):
            _run(*self.argv("iptables", "-I", chain, "-j", "DROP"))


@contextmanager
def network() -> Iterator[Network]:
    """Make one; skips where that cannot be done, and fails there with `CI` set."""
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        reason = f"needs root and iproute2 and iptables; missing: {', '.join(missing) or 'root'}"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    word = secrets.token_hex(3)
    name, here, there = f"tangram-{word}", f"tg{word}a", f"tg{word}b"
    block = f"10.{secrets.randbelow(64) + 190}.{secrets.randbelow(256)}"
    made = Network(name, f"{block}.1", f"{block}.2")
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        _run("ip", "link", "set", there, "netns", name)
        _run("ip", "addr", "add", f"{made.host}/30", "dev", here)
        _run("ip", "link", "set", here, "up")
        _run(*made.argv("ip", "addr", "add", f"{made.client}/30", "dev", there))
        _run(*made.argv("ip", "link", "set", there, "up"))
        yield made
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["ip", "link", "del", here], check=False, stderr=subprocess.DEVNULL)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = f"{' '.join(argv)}: {done.stderr.strip()}"
        pytest.fail(reason) if "CI" in os.environ else pytest.skip(reason)
