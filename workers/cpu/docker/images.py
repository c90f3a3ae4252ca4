"""Images on this node: pulled when they are needed, one pull at a time for each, and dropped when the cache is full.

| state    | meaning                                             | next                                               |
|----------|-----------------------------------------------------|----------------------------------------------------|
| absent   | not here                                            | wanted: pulling, unless never                      |
| pulling  | one pull for all that want it                       | here: present; failed, too late, or wanted by none |
|          |                                                     | any more: absent                                   |
| present  | used by containers or not                           | least recently used and too many                   |
"""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import dataclass, field

from workers.cpu.docker.engine import DockerEngine, Image
from workers.cpu.docker.options import PullPolicy
from workers.cpu.docker.pull import Pull
from workers.cpu.errors import ImageMissing
from workers.cpu.opening import Opening

log = logging.getLogger(__name__)

REPORT_S = 5.0
SNAPSHOTS = "tangram-snapshot"
"""The repository of snapshots of environments, which no registry has."""

# The parts of a name become a part of an address of the engine.
_REFERENCE = re.compile(r"[A-Za-z0-9](?!.*[./]{2})[A-Za-z0-9._/-]*(:[A-Za-z0-9][A-Za-z0-9._/:-]*)?(@[a-z0-9]+:[0-9a-f]+)?")
MIB = 1 << 20


@dataclass(slots=True)
class _Known:
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is decided whether to pull, and while a pull is joined or left; never while a pull is waited for."""
    pull: Pull | None = None
    image: Image | None = None
    was_absent: bool = False
    """Whether the image was not here when the last pull of it began."""
    fetched: bool = False
    used_at: float = 0.0
    users: int = 0


class Images:
    """The images that environments of this node are made of. A pull may take `pull_s` seconds in all.

    With `cache_mb`, images that this worker has fetched and no container of it uses are removed, the longest unused first, until the
    rest takes no more; images that were here before are never removed.
    """

    def __init__(self, engine: DockerEngine, policy: PullPolicy, pull_s: float, cache_mb: int | None) -> None:
        self._engine, self._policy, self._pull_s, self._cache_mb = engine, policy, pull_s, cache_mb
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}

    def use(self, reference: str, opening: Opening) -> None:
        """Return once an image is here, fetched if need be; it is kept until `leave`.

        A pull goes on as long as one opening waits for it. Raises `ImageMissing` when it is not here and may not, or cannot, be fetched.
        """
        if not _REFERENCE.fullmatch(reference):
            raise ImageMissing(f"{reference!r} cannot be the name of an image")
        known = self.note_use(reference)
        try:
            pull = self._join_pull(reference, known)
            if pull is not None:
                opening.phase = f"fetching image {reference}"
                self._await(pull, reference, known, opening)
            if known.image is None:
                raise ImageMissing(f"image {reference!r} was fetched and is not there")
        except BaseException:
            self.leave(reference)
            raise

    def note_use(self, reference: str) -> _Known:
        """Note that there is a container of the image; pair with `leave`."""
        with self._lock:
            known = self._known.setdefault(reference, _Known())
            known.users += 1
        return known

    def _join_pull(self, reference: str, known: _Known) -> Pull | None:
        """Return the pull to wait for, begun unless one is under way; None where there is nothing to wait for."""
        with known.lock:
            if known.pull is None:
                # Asked each time, for others remove images, too.
                here = self._engine.image(reference)
                may_pull = self._policy != "never" and not reference.startswith(f"{SNAPSHOTS}:")
                if here is not None and not (may_pull and self._policy == "always" and known.image is None):
                    known.image = here
                    return None
                if not may_pull:
                    raise ImageMissing(f"image {reference!r} is not on this node, and nothing is fetched here")
                known.pull, known.was_absent = self._begin(reference), here is None
            known.pull.waiters += 1
            return known.pull

    def _await(self, pull: Pull, reference: str, known: _Known, opening: Opening) -> None:
        """Wait for a pull; the last one to leave it ends it."""
        try:
            opening.wait(pull.done)
            with known.lock:
                known.image, known.fetched = self._engine.image(reference), known.fetched or known.was_absent
        finally:
            with known.lock:
                pull.waiters -= 1
                if not pull.waiters:
                    pull.cancel()
                    known.pull = None

    def _begin(self, reference: str) -> Pull:
        log.info("fetching image %s", reference)
        reported = began = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal reported
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                log.info("fetching image %s: %d of %d MB", reference, done // MIB, total // MIB)

        pull = Pull(reference, self._engine.pull_request(reference), self._pull_s, progress)

        def say(done: object) -> None:
            if pull.done.exception() is None:
                log.info("image %s is here after %.1f s", reference, time.monotonic() - began)

        pull.done.add_done_callback(say)
        return pull

    def leave(self, reference: str) -> None:
        """Note that a container of the image is gone; drop what the cache has no room for."""
        with self._lock:
            self._known[reference].users -= 1
            self._known[reference].used_at = time.monotonic()
        self._drop()

    def _drop(self) -> None:
        if self._cache_mb is None:
            return
        with self._lock:
            fetched = {name: known for name, known in self._known.items() if known.fetched and known.image is not None}
            total = sum(known.image.bytes for known in fetched.values() if known.image is not None)
            idle = sorted((known.used_at, name) for name, known in fetched.items() if not known.users)
            for _, name in idle:
                if total <= self._cache_mb * MIB:
                    return
                image = fetched[name].image
                if image is not None and self._engine.remove_image(name):
                    total -= image.bytes
                    log.info("image %s was dropped: fetched images take more than %d MB", name, self._cache_mb)
                    del self._known[name]
