"""The network of containers that may reach some addresses and nothing else.

| state    | meaning                                                  | next                                        |
|----------|----------------------------------------------------------|---------------------------------------------|
| absent   | no bridge, no rule; what an earlier worker left is gone  | rules first, then the bridge: standing      |
| standing | containers are made on it; rules that vanish come back   | rules cannot be put: nothing is made; close |
| closed   | the bridge is gone, then the rules                       |                                             |

The bridge is never there without its rules. Its containers do not hear of each other, have no IPv6, and no DNS: names of the
list are in their /etc/hosts, and the engine's own resolver, which would ask the world on their behalf, is told to ask an address
that nobody has, by a way that the rules close.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from workers.cpu.docker.allowed import AllowList, Entry
from workers.cpu.docker.engine import Engine
from workers.cpu.docker.firewall import Firewall
from workers.cpu.errors import ContainerFailed, EngineUnavailable, SandboxError

log = logging.getLogger(__name__)

NOBODY = "203.0.113.53"
"""A name server that does not exist: an address kept for documentation (RFC 5737)."""
LOOK_S = 5.0
_BRIDGE_FILTER = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")


def open_network(engine: Engine, node: str, entries: Sequence[Entry]) -> AllowedNetwork | None:
    """Return a network for what `entries` allow, None where there are none. What an earlier worker of the node has left goes.

    Raises:
        InvalidAction, EngineUnavailable: see `AllowedNetwork`.
        ContainerFailed: that, or somebody else's container is on the network that was left.

    """
    for left in engine.networks_left_by(node):
        log.info("removing network %s, which an earlier worker has left", left[:12])
        engine.remove_network(left)
        try:
            _firewall(node).remove()
        except EngineUnavailable as error:
            # Without their bridge they match nothing.
            log.warning("the rules of that network stay: %s", error)
    return AllowedNetwork(engine, node, entries) if entries else None


class AllowedNetwork:
    """The network of the node `node`. Any thread may use it.

    Raises:
        InvalidAction: a name of the list cannot be looked up, or has an address that cannot be allowed.
        EngineUnavailable: the packet filter, or the engine's use of it, does not allow for it here.
        ContainerFailed: the engine refuses the network.

    """

    def __init__(self, engine: Engine, node: str, entries: Sequence[Entry]) -> None:
        self._engine = engine
        self._allowed = AllowList.resolved(entries)
        self.name = "tangram-" + re.sub(r"[^A-Za-z0-9_.-]", "-", node)
        self.hosts = tuple(f"{name}:{address}" for name, address in self._allowed.names)
        """Lines for /etc/hosts, `name:address` each."""
        self._firewall = _firewall(node)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._id = ""
        for name, address in self._allowed.names:
            log.info("containers may reach %s at %s", name, address)
        self._firewall.put(self._allowed)
        try:
            self._id = engine.make_network(self.name, node, _interface(node))
            _check_bridge(_interface(node))
        except BaseException:
            self._remove()
            raise
        self._guard = threading.Thread(target=self._look, name="tangram-network", daemon=True)
        self._guard.start()

    def hold(self) -> None:
        """See that the rules are in force, and put them again where somebody has taken them away. Raises `EngineUnavailable`."""
        with self._lock:
            if not self._closed.is_set() and not self._firewall.holds():
                log.warning("the packet filter had lost the rules of network %s: they are put again", self.name)
                self._firewall.put(self._allowed)

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self.hold()
            except SandboxError as error:
                log.error("network %s: %s", self.name, error)

    def close(self) -> None:
        """Remove the network, on which no container is any more, and its rules; what cannot be removed goes when the next worker starts."""
        self._closed.set()
        self._guard.join()
        try:
            with self._lock:
                self._remove()
        except SandboxError as error:
            # The bridge goes first: where it stays, so do the rules.
            log.error("network %s stays: %s", self.name, error)

    def _remove(self) -> None:
        if self._id:
            self._engine.remove_network(self._id)
        self._firewall.remove()


def _key(node: str) -> str:
    # Names of interfaces have at most 15 characters.
    return hashlib.sha256(node.encode()).hexdigest()[:12]


def _interface(node: str) -> str:
    return f"tg-{_key(node)}"


def _firewall(node: str) -> Firewall:
    return Firewall(_interface(node), _key(node))


def _check_bridge(interface: str) -> None:
    """Refuse where the rules that were put are not those which the bridge's packets meet."""
    if not Path("/sys/class/net", interface).exists():
        raise EngineUnavailable("no allow-list: the engine's bridge is not in the worker's network: let the worker use the host's")
    try:
        filtered = _BRIDGE_FILTER.read_text().strip() == "1"
    except OSError:
        filtered = False
    if not filtered:
        raise ContainerFailed("no allow-list: packets between containers pass no filter: net.bridge.bridge-nf-call-iptables must be 1")
