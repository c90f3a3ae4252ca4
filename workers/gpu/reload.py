"""The services file, read again while the worker runs: when it has changed and then rested, and on SIGHUP.

A file that is being written in place is incomplete for a moment and may be valid all the same. So a changed file is read once it is the
same in two checks in a row. SIGHUP has it read at once.

A file is checked as a whole, with model folders and engines, before anything of it takes effect. A wrong file is refused in one log line,
and the worker goes on with what it had. A service of the file that is new can be called. An instance whose service is declared
otherwise, or no longer, is stopped once it is idle.

All this happens in a thread of its own, since stopping an engine takes time. The node's beats report the result to the scheduler.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from app.services_file import ConfigError, check_models, load_services_file
from workers.gpu.host import ServiceHost

log = logging.getLogger(__name__)


def described(host: ServiceHost) -> dict[str, Any]:
    """Return the services of a node as it describes them to the scheduler, which plans with the memory that they need there."""
    same = ("task", "cells", "restore_s", "max_concurrency", "instances", "pinned", "warm")
    return {
        name: {"memory_mb": host.needed_mb(name, service), **{field: getattr(service, field) for field in same}}
        for name, service in host.services.items()
    }


class Reload:
    """Checks the services file, and instances that are no longer declared, every `interval_s` seconds."""

    def __init__(self, path: Path | None, host: ServiceHost, interval_s: float) -> None:
        """Regard the file as read; without `path` there is none."""
        self._path, self._host, self._interval_s = path, host, interval_s
        self._seen = self._last = self._stamp()
        self._wake, self._over = threading.Event(), threading.Event()
        self._asked = False
        self._thread = threading.Thread(target=self._run, name="tangram-services", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def ask(self) -> None:
        """Have the file read again now, changed or not; may be called by a signal's handler."""
        self._asked = True
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End, waiting at most `timeout_s` for what is under way."""
        self._over.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Read the file again if it has changed or that was asked for, and stop idle instances that are no longer declared."""
        stamp, last = self._stamp(), self._last
        self._last = stamp
        if self._path is not None and (self._asked or stamp == last != self._seen):
            self._asked, self._seen = False, stamp
            self._read(self._path)
        self._host.check()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self.check()
            except Exception:
                # An engine that cannot be stopped must not end this thread; the next check tries again.
                log.exception("the check of the services failed")
            self._wake.wait(self._interval_s)
            self._wake.clear()

    def _read(self, path: Path) -> None:
        before = self._host.services
        try:
            file = load_services_file(path)
            check_models(path, file)
            self._host.reload(file.services)
        except ConfigError as error:
            log.error("the services file is refused, the worker goes on with what it had: %s", error)
            return
        now = self._host.services
        new = [name for name in now if name not in before]
        changed = [name for name in now if name in before and now[name] != before[name]]
        gone = [name for name in before if name not in now]
        parts = (f"{word} {', '.join(names)}" for word, names in (("new:", new), ("changed:", changed), ("gone:", gone)) if names)
        log.warning("the services file was read again; %s", "; ".join(parts) or "nothing has changed")

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else None
