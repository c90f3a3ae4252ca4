"""An environment that is a container."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.container import Container
from workers.cpu.docker.files import ContainerFiles
from workers.cpu.errors import ProcessesLeft, SandboxError
from workers.cpu.shell.environment import ShellEnvironment
from workers.cpu.shell.session_setup import SessionSetup

log = logging.getLogger(__name__)

NOTICE_LIMIT_S, PAUSE_S = 5.0, 0.003


class ContainerEnvironment(ShellEnvironment):
    """One environment of a `ContainerSandbox`; `give_back` removes its container."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        container: Container,
        files: ContainerFiles,
        setup: SessionSetup,
        forget: Callable[[str], None],
        give_back: Callable[[Container], None],
    ) -> None:
        super().__init__(spec, files, setup, forget)
        self.container, self._give_back = container, give_back

    def snapshot(self, repository: str, tag: str, node: str) -> str:
        """Make an image of the files as they are now; see `ContainerSandbox.snapshot`."""
        with self._or_gone():
            return self.container.engine.commit(self.container.id, repository, tag, node)

    def lose(self) -> None:
        """Take note that the container has ended by itself: commands end as lost, and the environment goes off the books."""
        loss = self.container.loss()

        def clear() -> None:
            # Commands that run have some time to say how they ended. The scheduler hears of the loss by a beat without the environment.
            deadline = time.monotonic() + NOTICE_LIMIT_S
            while self.is_busy and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            try:
                self.close()
            except (SandboxError, OSError) as error:
                log.warning("environment %s left something behind: %s", self._spec.id, error)

        with self._lock:
            self._closed = True
        if self.allowance is not None:
            self.allowance.close()
        log.warning("environment %s is lost: %s", self._spec.id, loss)
        threading.Thread(target=clear, name="tangram-lost", daemon=True).start()

    def hang_up(self) -> None:
        """Begin to close. A container that somebody else has paused goes on: what is frozen cannot end."""
        with contextlib.suppress(OSError):
            self.container.group.controls().thaw()
        super().hang_up()

    def _end_sessions(self) -> None:
        """End the sessions; what does not end now, such as a process that the kernel holds up, ends with the container."""
        try:
            super()._end_sessions()
        except ProcessesLeft as error:
            log.warning("%s: they are left to the removal of the container", error)

    def _remove(self) -> None:
        self._give_back(self.container)
