"""Containers that stand ready, and the bound on how many start at once.

Starting them is the commonest failure at scale, so whoever wants one waits in line for a place to start it; nothing is
ever started beside the line, the warm ones included, which wait behind everybody who needs one now.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from workers.cpu.docker.container import Container, ContainerMaker
from workers.cpu.docker.images import Images
from workers.cpu.errors import EnvironmentGone, SandboxError, StartTimeout

log = logging.getLogger(__name__)

RETRY_S = 5.0


class Pool:
    """Gives containers, of which `warm` says how many of an image stand ready; at most `starting_limit` start at once."""

    def __init__(self, maker: ContainerMaker, images: Images, warm: Mapping[str, int], memory_mb: int, starting_limit: int) -> None:
        self._maker, self._images, self._warm, self._memory_mb = maker, images, dict(warm), memory_mb
        self._changed = threading.Condition()
        self._ready: dict[str, deque[Container]] = {image: deque() for image in warm}
        self._free = starting_limit
        self._line: deque[object] = deque()
        self._closed = False
        self._filler = threading.Thread(target=self._fill, name="tangram-warm", daemon=True)
        if self._warm:
            self._filler.start()

    def take(self, image: str, memory_mb: int, wait_s: float) -> Container:
        """Return a container of an image, a warm one where there is one; wait at most `wait_s` for the turn to start it.

        Raises:
            StartTimeout: it was not its turn in time, or it did not stand in time.
            ContainerFailed, ImageMissing, EngineUnavailable: as their names say.
            EnvironmentGone: the pool is closed.

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
        return self._make(image, memory_mb, object(), wait_s)

    def _pop(self, image: str) -> Container | None:
        with self._changed:
            ready = self._ready.get(image)
            container = ready.popleft() if ready else None
            self._changed.notify_all()
        return container

    def _make(self, image: str, memory_mb: int, turn: object | None, wait_s: float | None) -> Container:
        """Fetch the image if need be, then start a container when it is our turn."""
        self._images.use(image)
        try:
            with self._place(turn, wait_s):
                return self._maker.make(image, memory_mb)
        except BaseException:
            self._images.leave(image)
            raise

    @contextmanager
    def _place(self, turn: object | None, wait_s: float | None) -> Iterator[None]:
        """Hold one of the places to start in, once `turn` is first in line; None waits until nobody is."""
        with self._changed:
            if turn is not None:
                self._line.append(turn)
            try:
                if not self._changed.wait_for(lambda: self._closed or self._may_start(turn), wait_s):
                    raise StartTimeout(f"{len(self._line) - 1} other containers had to start first for {wait_s:g} s")
                if self._closed:
                    raise EnvironmentGone("the sandbox is closed")
                self._free -= 1
            finally:
                if turn is not None:
                    self._line.remove(turn)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    def _may_start(self, turn: object | None) -> bool:
        return self._free > 0 and (self._line[0] is turn if self._line else turn is None)

    def give_back(self, container: Container, image: str) -> None:
        """Remove a container."""
        try:
            container.remove()
        finally:
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
        """Start one more; say whether it worked."""
        try:
            container = self._make(image, self._memory_mb, None, None)
        except EnvironmentGone:
            return False
        except (SandboxError, OSError) as error:
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

    def refuse(self) -> None:
        """Start nothing more: whoever waits for a place is refused."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Remove what stands ready; who waits is refused."""
        self.refuse()
        if self._filler.is_alive():
            self._filler.join()
        for image, ready in self._ready.items():
            while ready:
                self.give_back(ready.popleft(), image)
