"""Containers that stand ready, and the bound on how many start at once.

Starting containers is the commonest failure at scale. Each start therefore waits for a start slot, in order; those that are to
stand ready come after all that an environment waits for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager

from workers.cpu.docker.container import Container, ContainerMaker
from workers.cpu.docker.images import Images
from workers.cpu.errors import EnvironmentGone, SandboxError
from workers.cpu.leftovers import Leftovers
from workers.cpu.opening import Opening

log = logging.getLogger(__name__)

RETRY_S = 5.0


class StartSlots:
    """Lets `limit` containers start at once, those with `warm` only while no other waits."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._free = limit
        self._waiting: deque[Future[None]] = deque()
        self._waiting_warm: deque[Future[None]] = deque()

    @contextmanager
    def slot(self, opening: Opening, *, warm: bool) -> Iterator[None]:
        """Wait for a start slot, and hold it as long as the block lasts."""
        slot: Future[None] = Future()
        queue = self._waiting_warm if warm else self._waiting
        with self._lock:
            queue.append(slot)
            self._grant()
        try:
            opening.wait(slot)
            yield
        finally:
            with self._lock:
                if slot.done():
                    self._free += 1
                else:
                    queue.remove(slot)
                self._grant()

    def _grant(self) -> None:
        while self._free and (queue := self._waiting or self._waiting_warm):
            queue.popleft().set_result(None)
            self._free -= 1


class Pool:
    """Gives containers, of which `warm` says how many of an image stand ready; at most `starting_limit` start at once."""

    def __init__(
        self,
        maker: ContainerMaker,
        images: Images,
        warm: Mapping[str, int],
        memory_mb: int,
        starting_limit: int,
        leftovers: Leftovers,
    ) -> None:
        self._maker, self._images, self._warm, self._memory_mb = maker, images, dict(warm), memory_mb
        self._leftovers = leftovers
        self._slots = StartSlots(starting_limit)
        self._changed = threading.Condition()
        self._ready: dict[str, deque[Container]] = {image: deque() for image in warm}
        self._closed = False
        self._filling = Opening()
        self._filler = threading.Thread(target=self._fill, name="tangram-warm", daemon=True)
        if self._warm:
            self._filler.start()

    def take(self, image: str, memory_mb: int, opening: Opening) -> Container:
        """Return a container of an image, a warm one where there is one.

        Raises `ContainerFailed`, `ImageMissing`, `EngineUnavailable` or `StartTimeout` as their names say.
        """
        while (warm := self._pop(image)) is not None:
            if not warm.has_ended():
                try:
                    warm.set_memory(memory_mb)
                except BaseException:
                    self.give_back(warm, image)
                    raise
                return warm
            self.give_back(warm, image)
        return self._make(image, memory_mb, opening, warm=False)

    def _pop(self, image: str) -> Container | None:
        with self._changed:
            ready = self._ready.get(image)
            container = ready.popleft() if ready else None
            self._changed.notify_all()
        return container

    def _make(self, image: str, memory_mb: int, opening: Opening, *, warm: bool) -> Container:
        """Fetch the image if need be, then start a container once a start slot is free."""
        self._images.use(image, opening)
        try:
            opening.phase = "waiting for its turn to start a container"
            with self._slots.slot(opening, warm=warm):
                opening.phase = "starting a container"
                return self._maker.make(image, memory_mb, opening)
        except BaseException:
            self._images.leave(image)
            raise

    def give_back(self, container: Container, image: str) -> None:
        """Remove a container; one that the engine does not remove now is tried again."""
        self._leftovers.removed(f"container {container.id[:12]}", container.remove)
        self._images.leave(image)

    def _missing(self) -> list[str]:
        """Return the images of which too few stand ready."""
        return [image for image, wanted in self._warm.items() if len(self._ready[image]) < wanted]

    def _fill(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._missing())
                missing = self._missing()
                if self._closed:
                    return
            # One image that cannot be had must not keep the others from standing ready.
            if not any([self._add_warm(image) for image in missing]):
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_S)

    def _add_warm(self, image: str) -> bool:
        try:
            container = self._make(image, self._memory_mb, self._filling, warm=True)
        except (SandboxError, OSError) as error:
            if not self._filling.has_ended:
                log.warning("no warm container of %s: %s", image, error)
            return False
        with self._changed:
            if not self._closed:
                self._ready[image].append(container)
                return True
        self.give_back(container, image)
        return False

    def standing(self, image: str) -> int:
        """Return how many of an image stand ready."""
        with self._changed:
            return len(self._ready.get(image, ()))

    def close(self) -> None:
        """Remove what stands ready; nothing is made ready any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._filling.end(EnvironmentGone("the sandbox is closed"))
        if self._filler.is_alive():
            self._filler.join()
        for image, ready in self._ready.items():
            while ready:
                self.give_back(ready.popleft(), image)
