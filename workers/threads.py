"""The pool of threads of a worker. At a limit on processes no thread can be started: tasks then wait for the threads that there are."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery.concurrency import thread

log = logging.getLogger(__name__)


class TaskPool(thread.TaskPool):  # type: ignore[misc]
    """Celery's pool of threads. An error at the start of a thread does not reach the consumer, which would end the worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.executor = _Executor(max_workers=self.limit)
        self.executor.submit(int)  # starts a thread, as later the system may give none


class _Executor(ThreadPoolExecutor):
    _has_said = False

    def _adjust_thread_count(self) -> None:
        """Start a thread, if that is needed, for what has just been put into the queue."""
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:
                raise
            if not self._has_said:
                log.warning("tasks wait for the %d threads that there are: %s", len(self._threads), error)
            self._has_said = True
