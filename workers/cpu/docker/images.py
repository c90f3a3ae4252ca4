"""Images on this node: fetched when they are needed, one fetch at a time for each, and dropped when the cache is full.

| state    | meaning                                      | next                                |
|----------|----------------------------------------------|-------------------------------------|
| absent   | not here                                     | wanted: fetching, unless never      |
| fetching | one thread fetches, others wait for it       | here: present; else absent, refused |
| present  | used by containers or not                    | least recently used and too many    |
"""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import dataclass, field

from workers.cpu.docker.engine import Engine, Image
from workers.cpu.docker.options import Pull
from workers.cpu.errors import ImageMissing

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
    image: Image | None = None
    fetched: bool = False
    used_at: float = 0.0
    users: int = 0


class Images:
    """The images that environments of this node are made of.

    With `cache_mb`, images that this worker has fetched and no container of it uses are removed, the longest unused first, until the
    rest takes no more; images that were here before are never removed.
    """

    def __init__(self, engine: Engine, pull: Pull, cache_mb: int | None) -> None:
        self._engine, self._pull, self._cache_mb = engine, pull, cache_mb
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}

    def use(self, reference: str) -> Image:
        """Return an image that is here now, fetched if need be, and keep it until `leave`.

        Raises:
            ImageMissing: it is not here and may not, or cannot, be fetched.

        """
        if not _REFERENCE.fullmatch(reference):
            raise ImageMissing(f"{reference!r} cannot be the name of an image")
        with self._lock:
            known = self._known.setdefault(reference, _Known())
            known.users += 1
        try:
            with known.lock:
                image = self._present(reference, known)
        except BaseException:
            self.leave(reference)
            raise
        return image

    def _present(self, reference: str, known: _Known) -> Image:
        # Asked each time, for others remove images, too.
        before = self._engine.image(reference)
        if before is None and (self._pull == "never" or reference.startswith(f"{SNAPSHOTS}:")):
            raise ImageMissing(f"image {reference!r} is not on this node, and nothing is fetched here")
        fresh = self._pull == "always" and known.image is None and not reference.startswith(f"{SNAPSHOTS}:")
        if before is None or fresh:
            self._fetch(reference)
            known.fetched = known.fetched or before is None
        known.image = self._engine.image(reference)
        if known.image is None:
            raise ImageMissing(f"image {reference!r} was fetched and is not there")
        return known.image

    def _fetch(self, reference: str) -> None:
        log.info("fetching image %s", reference)
        reported = began = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal reported
            if time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                log.info("fetching image %s: %d of %d MB", reference, done // MIB, total // MIB)

        self._engine.pull(reference, progress)
        log.info("image %s is here after %.1f s", reference, time.monotonic() - began)

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
