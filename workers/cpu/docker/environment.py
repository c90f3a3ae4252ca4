"""An environment that is a container."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from workers.cpu.abstract import EnvironmentSpec
from workers.cpu.docker.container import Container
from workers.cpu.docker.files import ContainerFiles
from workers.cpu.errors import EnvironmentGone, SandboxError
from workers.cpu.shell.environment import ShellEnvironment
from workers.cpu.shell.session import SessionSetup

log = logging.getLogger(__name__)


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
        self._lost = ""

    def snapshot(self, repository: str, tag: str) -> str:
        """Make an image of the files as they are now; see `ContainerSandbox.snapshot`."""
        self._check_open()
        return self.container.engine.commit(self.container.id, repository, tag, self._spec.id)

    def lose(self) -> None:
        """Take note that the container has ended: running commands end as failed, and the environment goes off the books."""
        self._lost = self.container.engine.state(self.container.id) or "its container ended"

        def clear() -> None:
            with contextlib.suppress(SandboxError):
                self.close()

        with self._lock:
            self._closed = True
        log.warning("environment %s is gone: %s", self._spec.id, self._lost)
        threading.Thread(target=clear, name="tangram-lost", daemon=True).start()

    def _check_open(self) -> None:
        if self._lost:
            raise EnvironmentGone(f"environment {self._spec.id} is gone: {self._lost}")
        super()._check_open()

    def _remove(self) -> None:
        self._give_back(self.container)
