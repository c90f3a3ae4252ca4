"""What containers are made with. Users and networks are checked here, numbers by the settings (`tangram/settings.py`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from tangram.errors import InvalidAction

LEAST_MEMORY_MB = 6
"""The least memory that the engine gives a container. The setting `container_memory_mb` has the same bound."""

PullPolicy = Literal["missing", "always", "never"]

_USER = re.compile(r"\d+:\d+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """What each container is held to. Memory is the environment's own, `memory_mb` where it names none; swap is never had.

    `disk_mb` bounds what a container writes: hard where the engine's storage can, else watched every `disk_check_s` seconds
    while a command runs, and a single file can never be larger. `processes` counts threads, too.
    """

    memory_mb: int = 2048
    processes: int = 512
    open_files: int = 4096
    disk_mb: int = 4096
    disk_check_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """How containers are made.

    `user` is `uid:gid`, never 0. `image` is for environments that name none. `network` is the name of a
    Docker network, or `none`. With `read_only`, only the work folder and `/tmp` can be written, both in memory. `runtime` is one that
    the engine knows and whose processes the host sees. `pull_s` is how long fetching an image may take in all, `start_timeout_s` how
    long a container may take to come up. `warm` says how many containers of an image stand ready. None is opened while less than
    `disk_floor_mb` MiB of disk are free.
    """

    user: str = "1000:1000"
    image: str | None = None
    network: str = "none"
    read_only: bool = False
    runtime: str | None = None
    pull: PullPolicy = "missing"
    pull_s: float = 1800.0
    image_cache_mb: int | None = None
    start_timeout_s: float = 60.0
    starting_limit: int = 4
    disk_floor_mb: int = 0
    warm: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    limits: ContainerLimits = field(default_factory=ContainerLimits)

    def __post_init__(self) -> None:
        """Refuse users that are not two numbers, root, and networks that are not the container's own."""
        if not _USER.fullmatch(self.user):
            raise InvalidAction("user", f"must be like 1000:1000, not {self.user!r}")
        if self.uid == 0:
            raise InvalidAction("user", "must not be root")
        if self.network in ("", "host") or ":" in self.network:
            raise InvalidAction("network", f"must be the name of a Docker network, or none, not {self.network!r}")

    @property
    def uid(self) -> int:
        """The user's number."""
        return int(self.user.split(":")[0])

    @property
    def gid(self) -> int:
        """The group's number."""
        return int(self.user.split(":")[1])
