"""A hub and hosts around it, each with an address of its own, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.hosts.link import Weather, enter, worst
from tests.needed import needed

ROOT = Path(__file__).resolve().parents[2]
HUB, FIRST = "10.78.0.1", "10.78.1.2"
"""The addresses of the hub and of the first host."""

_SWEEP = """
read _
for space; do
  [ ! -e "/run/netns/$space" ] || { ip netns pids "$space" | grep -vx "$0" | xargs -r kill -KILL; ip netns delete "$space"; }
done
"""
"""Waits for the end of its standard input, as when the process `$0` is gone. Then no namespace is left, and no other process in one."""


class NoNamespaces(Exception):
    """Raised where network namespaces cannot be made; the message says why."""


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoNamespaces("there is no `ip` (iproute2)") from None
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"ip {' '.join(words)}: {error.stderr.strip()}") from None


class Network:
    """Namespaces and the lines between them, while its block runs. A host's line can be given delay and loss, and be cut."""

    def __init__(self, hosts: Sequence[str], seed: int = 0) -> None:
        self.hosts = list(hosts)
        self._prefix = f"tangram-{uuid.uuid4().hex[:8]}"
        self._seed = seed
        self._sweeper: subprocess.Popen[bytes] | None = None
        self._lines: dict[str, subprocess.Popen[str]] = {}
        self._weathers: dict[str, list[Weather]] = {host: [] for host in hosts}
        self._changing = threading.Lock()

    def __enter__(self) -> Self:
        try:
            if os.geteuid():
                raise NoNamespaces("making network namespaces needs root")
            if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
                raise NoNamespaces("there is no /dev/net/tun")
            spaces = [self._named(host) for host in ("hub", *self.hosts)]
            argv = ["sh", "-c", _SWEEP, str(os.getpid()), *spaces]
            self._sweeper = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
            for host in ["hub", *self.hosts]:
                _ip("netns", "add", self._named(host))
                _ip("-n", self._named(host), "link", "set", "lo", "up")
            _ip("-n", self._named("hub"), "address", "add", f"{HUB}/32", "dev", "lo")
            for number, host in enumerate(self.hosts):
                self._join(host, number)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for line in self._lines.values():
            line.communicate()
        if self._sweeper is not None:
            self._sweeper.communicate()

    def _named(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def _path(self, host: str) -> Path:
        return Path("/run/netns", self._named(host))

    def _join(self, host: str, number: int) -> None:
        argv = [sys.executable, "-m", "tests.hosts.link", str(self._path("hub")), str(self._path(host)), host, str(self._seed + number)]
        pipe = subprocess.PIPE
        line = subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        self._lines[host] = line
        if self._answer(line) != "\n":
            raise NoNamespaces(f"the line to {host} ended with {line.wait()}")
        address = f"10.78.{number + 1}.2"
        _ip("-n", self._named(host), "address", "add", f"{address}/32", "dev", "hub")
        _ip("-n", self._named(host), "link", "set", "hub", "up")
        _ip("-n", self._named(host), "route", "add", f"{HUB}/32", "dev", "hub", "src", address)
        _ip("-n", self._named("hub"), "link", "set", host, "up")
        _ip("-n", self._named("hub"), "route", "add", f"{address}/32", "dev", host, "src", HUB)

    @staticmethod
    def _answer(line: subprocess.Popen[str]) -> str:
        assert line.stdout is not None
        return line.stdout.readline()

    @contextmanager
    def _weather_of(self, host: str) -> Iterator[list[Weather]]:
        """Give what is wrong with the line of a host; after the block, it is as bad as the worst of that."""
        with self._changing:
            yield (weathers := self._weathers[host])
            line = self._lines[host]
            assert line.stdin is not None
            line.stdin.write(worst(weathers).to_json() + "\n")
            line.stdin.flush()
            assert self._answer(line) == "\n", f"the line to {host} is gone"

    def worsen(self, host: str, weather: Weather) -> None:
        """Let the line of a host be no better than this from now on."""
        with self._weather_of(host) as weathers:
            weathers.append(weather)

    def better(self, host: str, weather: Weather) -> None:
        """Take back one `worsen`; nothing where that was done before."""
        with self._weather_of(host) as weathers, suppress(ValueError):
            weathers.remove(weather)

    def calm(self, host: str) -> None:
        """Let nothing be wrong with the line of a host."""
        with self._weather_of(host) as weathers:
            weathers.clear()

    def enter(self, host: str) -> None:
        """Let this thread, and the threads and processes that it starts, be on a host."""
        enter(self._path(host))

    def on(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return a command that runs on a host. Only its network differs: it sees this machine's files and processes."""
        return ["nsenter", f"--net={self._path(host)}", "--", *argv]

    def start(self, host: str, argv: Sequence[str], variables: Mapping[str, str], log: IO[Any]) -> subprocess.Popen[bytes]:
        """Start a process on a host. A terminal's interrupt does not reach it."""
        there, own, nothing = self.on(host, argv), dict(variables), subprocess.DEVNULL
        return subprocess.Popen(there, cwd=ROOT, env=own, stdin=nothing, stdout=log, stderr=log, start_new_session=True)


@contextmanager
def beside(host: str) -> Iterator[Network]:
    """Have this thread be on the hub of a network with one host; where that cannot be, skip the test, or fail it with CI set."""
    with open("/proc/thread-self/ns/net") as here, ExitStack() as ends:
        try:
            made = ends.enter_context(Network([host]))
        except NoNamespaces as error:
            needed(str(error))
            raise
        made.enter("hub")
        ends.callback(enter, Path(f"/proc/self/fd/{here.fileno()}"))
        yield made
