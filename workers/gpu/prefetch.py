"""Instances that are brought onto cells before an action needs them, each in a thread of its own.

The scheduler asks for a prefetch and must learn how it ended. The host reports changes and failures. An instance that was resident
already has no change to report, so the end of a prefetch is always reported once more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from tangram.errors import TangramError
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName

log = logging.getLogger(__name__)


class Prefetch:
    """The prefetches that are under way, at most one for each instance. Safe for many threads."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._threads: dict[InstanceName, threading.Thread] = {}

    def begin(self, name: InstanceName, evict: Sequence[InstanceName] = ()) -> bool:
        """Evict instances, then bring one onto its cells, in a thread; returns False if that is under way already."""
        with self._lock:
            if name in self._threads:
                return False
            thread = threading.Thread(target=self._fetch, args=(name, tuple(evict)), name=f"tangram-prefetch-{name.service}", daemon=True)
            self._threads[name] = thread
        thread.start()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is under way; False if the time was not enough."""
        with self._lock:
            threads = list(self._threads.values())
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _fetch(self, name: InstanceName, evict: Sequence[InstanceName]) -> None:
        try:
            self._host.ensure_resident(name.service, name.cells, [*evict, *self._host.in_the_way(name.service, name.cells, evict)])
        except TangramError as error:
            log.warning("the restore of %s: %s", name, error)
        else:
            self._host.publish(name)
        finally:
            with self._lock:
                del self._threads[name]
