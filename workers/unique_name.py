"""One name, one worker: two workers under one name would take each other's grants, and each would count as the other's restart.

A worker holds its name by a key of the result store, whose life it prolongs with each beat. The key names its host and process. On the same
host, the name of a killed worker is taken over at once. Of several that find it, one takes it. On another host the name is free after three
beats without a sign of life. A worker that did not run for so long may find its name taken. It ends at once: its successor has adopted what
stood, or stands on another host.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
from redis import Redis, RedisError
from redis.client import Pipeline

from app.services_file import ConfigError
from scheduler.model.lifecycle import MISSED_BEATS
from tangram.wire import NODE_KEY_PREFIX

log = logging.getLogger(__name__)

_TRIES = 10
"""Tries to change the name. redis-py takes each error of a watched transaction for a change by somebody else, and would try for ever."""


class UniqueName:
    """The name of a node, as its worker holds it. With each beat it calls `each_beat`, too."""

    def __init__(self, store: Redis, name: str, beat_s: float, each_beat: Callable[[Redis], object] = lambda _: None) -> None:
        self._store, self._name, self._beat_s, self._each_beat = store, name, beat_s, each_beat
        self._key, self._ttl_ms = NODE_KEY_PREFIX + name, max(1, round(MISSED_BEATS * beat_s * 1000))
        self._holder = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(4)}"
        self._released = threading.Event()

    def take(self) -> None:
        """Take the name. Raises `ConfigError` while another worker beats under it, and what redis-py raises."""
        deadline, is_late = time.monotonic() + (MISSED_BEATS + 1) * self._beat_s, False
        while not self._store.set(self._key, self._holder, nx=True, px=self._ttl_ms):
            holder = self._present()
            if _is_dead(holder) and self._if_held_by(holder, lambda change: change.set(self._key, self._holder, px=self._ttl_ms)):
                break
            if is_late:
                raise ConfigError(self._taken_by(holder))
            time.sleep(self._beat_s / 4)
            is_late = time.monotonic() > deadline  # before the next try: whoever has the name then has beaten meanwhile
        threading.Thread(target=self._hold, name="tangram-name", daemon=True).start()

    def release(self) -> None:
        """Give the name back."""
        self._released.set()
        with suppress(Exception):  # mostly a RedisError: it expires anyway
            self._if_held_by(self._holder, lambda change: change.delete(self._key))

    def _hold(self) -> None:
        while not self._released.wait(self._beat_s):
            with suppress(Exception):  # mostly a RedisError: while the store is away nobody else can take the name
                holder = self._present()
                if holder not in ("", self._holder):
                    log.critical("%s", self._taken_by(holder))
                    os._exit(1)  # as if it had been killed: whatever it would do on its way out is its successor's by now
                if holder:
                    self._store.pexpire(self._key, self._ttl_ms)  # harmless if the key is another's by now
                else:
                    self._store.set(self._key, self._holder, px=self._ttl_ms, nx=True)
                self._each_beat(self._store)

    def _if_held_by(self, holder: str, add: Callable[[Pipeline], object]) -> bool:
        """Carry out what `add` puts into a pipeline, if `holder` has the name at that moment; return whether it did."""
        tries = iter(range(_TRIES))

        def change(pipeline: Pipeline) -> None:
            if next(tries, None) is None:
                raise RedisError("the store does not let the name of the node be changed")
            if self._present() == holder:
                pipeline.multi()
                add(pipeline)

        return bool(self._store.transaction(change, self._key))

    def _present(self) -> str:
        """Return who has the name, or nothing."""
        value = self._store.get(self._key)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""

    def _taken_by(self, holder: str) -> str:
        where = " process ".join(holder.split(" ")[:2])
        return f"another worker is the node {self._name}, on {where}: name this one otherwise, by TANGRAM_NODE_NAME"


def _is_dead(holder: str) -> bool:
    """Whether a holder was a process of this host that is gone."""
    host, _, rest = holder.partition(" ")
    pid = rest.partition(" ")[0]
    return host == socket.gethostname() and pid.isdigit() and not psutil.pid_exists(int(pid))
