"""How a worker ends, by the signal that it gets.

| signal        | a worker whose environments can outlive it                  | any other worker |
|---------------|-------------------------------------------------------------|------------------|
| SIGTERM       | hands over                                                  | leaves           |
| SIGTERM again | waits no longer for what runs                               | nothing more     |
| SIGINT        | leaves, also where it hands over already                    | leaves           |

| state | meaning | next |
|---|---|---|
| serving | it takes what it is granted | SIGTERM: handing over; SIGINT: leaving |
| handing over | its beats say so; what the scheduler granted before it read one runs on | nothing runs: gone; SIGINT: leaving |
| | | TANGRAM_HAND_OVER_S are over, or SIGTERM: gone |
| gone | as after kill -9: environments and the commands in them wait for the next worker | no environment stands: |
| | (`cpu/handover/protocol.py`); all else that runs is lost | leaving, instead of it |
| leaving | the scheduler is told that it leaves; what runs is stopped, environments are closed | |

To a beat that says so, the scheduler answers `tangram.let_go`. This comes behind all that it has granted, so nothing is granted in vain.
While a worker hands over, it still carries out stops, closes and changes of cores.

A `shutdown` of Celery's remote control, which Flower offers, is a SIGTERM (`control.py`).

A worker that is killed while it hands over is gone a little earlier. Before it serves, SIGTERM ends it as kill -9 does.
A CPU worker whose terminal is closed (SIGHUP) ends as by kill -9, too.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import Any

from celery import signals
from celery.apps.worker import Worker

from tangram.blobs import Blobs
from workers.node import Node
from workers.unique_name import UniqueName

log = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], object]

THREADS = 4
"""Two may hand over, after one SIGTERM each, while two leave."""


def end_as_killed() -> None:
    """Have SIGTERM, until `Shutdown` takes it, and a closed terminal end this process at once. What ignores them stays so."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


class Shutdown:
    """Ends the worker that is `node`. `stands` says whether an environment does that can outlive it; None where none can."""

    def __init__(self, node: Node, blobs: Blobs, name: UniqueName, limit_s: float, stands: Callable[[], bool] | None) -> None:
        self._node, self._blobs, self._name, self._limit_s, self._stands = node, blobs, name, limit_s, stands
        self._is_asked = self._leaves = False
        self._celery: Handler | None = None
        # A signal's handler runs in the middle of anything, perhaps of what holds the node's lock, and may find no thread to be had.
        self._work = SimpleQueue[Callable[[], object]]()
        for _ in range(THREADS):
            threading.Thread(target=self._run, name="tangram-shutdown", daemon=True).start()
        signals.worker_shutting_down.connect(self._leave, weak=False)

    def _run(self) -> None:
        while True:
            self._work.get()()

    def take_signals(self) -> None:
        """Take SIGTERM over from Celery."""
        before = signal.getsignal(signal.SIGTERM)
        if self._stands is not None and callable(before):
            self._celery = before
            signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        if self._leaves and self._celery is not None:
            self._celery(number, frame)
            return
        limit_s, self._is_asked = 0.0 if self._is_asked else self._limit_s, True
        self._work.put(lambda: self._hand_over(limit_s))

    def _hand_over(self, limit_s: float) -> None:
        log.warning("this worker hands over: what runs has %g s to end", limit_s)
        if not self._node.hand_over(limit_s):
            return
        assert self._stands is not None
        if not self._stands():
            self._leaves = True
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._node.send_rest()
        self._name.release()
        sys.stdout.flush()
        # Threads of commands that run on would hold up any other end.
        os._exit(0)

    def _leave(self, **_: Any) -> None:
        for leaving in (self._blobs.close, self._node.leave):
            self._work.put(leaving)


class NodeWorker(Worker):  # type: ignore[misc]
    """Celery's worker, which ends as `shutdown` says."""

    def __init__(self, shutdown: Shutdown, **options: Any) -> None:
        self._ending = shutdown
        super().__init__(**options)

    def install_platform_tweaks(self, worker: Worker) -> None:
        """Set up the handlers of signals."""
        super().install_platform_tweaks(worker)
        self._ending.take_signals()
