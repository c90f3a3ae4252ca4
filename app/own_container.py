"""The container that this process runs in, where the Docker engine of this machine has made it, and how its node is called.

The kernel names a container in the path of a process's control group. The engine says whether it is one of its own. So nothing has to be
set: on a host, in a pod and in a container of another engine there is no such container.

A node is named after its host, as a rule. A container has a host name of its own, by default its id. Another one has its place when compose
replaces it. Compose's labels stay: project, service and number. With them goes the name of the engine's host, since several machines may
have the same project.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tangram.errors import TangramError
from tangram.settings import Settings

COMPOSE = "com.docker.compose."
ENGINE_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnContainer:
    """`image` is the id of the image that it was made of, `service` what stays of its name, empty where compose has not made it."""

    image: str
    service: str


@cache
def own_container() -> OwnContainer | None:
    """Return the container of this process, None where the engine here has made none. Raises `TangramError` if that does not answer."""
    names = re.findall(r"[0-9a-f]{64}", Path("/proc/self/cgroup").read_text())
    if not names:
        return None
    try:
        import docker
        import requests
        from docker.errors import DockerException, NotFound
    except ModuleNotFoundError:
        return None  # A worker that is to ask an engine for environments says what is missing.
    try:
        engine = docker.APIClient(version="auto", timeout=ENGINE_LIMIT_S)
        try:
            found, host = engine.inspect_container(names[-1]), engine.info()["Name"]
        except NotFound:
            return None
        finally:
            engine.close()
    except (DockerException, requests.RequestException) as error:
        raise TangramError(f"no Docker engine answers: {error}") from error
    return OwnContainer(image=found["Image"], service=service_name(found["Config"]["Labels"] or {}, host))


def service_name(labels: Mapping[str, Any], host: str) -> str:
    """Return what stays of the name of a container with these labels when compose replaces it; nothing where compose does not."""
    known = [labels.get(f"{COMPOSE}{word}") for word in ("project", "service", "container-number")]
    # A one-off container, of `compose run`, has the number of another one.
    return "-".join([host, *map(str, known)]) if all(known) and labels.get(f"{COMPOSE}oneoff") != "True" else ""


def node_name(kind: str, settings: Settings) -> str:
    """Return the name of the node that a worker of a kind is. Raises `TangramError` where an engine has to be asked and does not answer."""
    if settings.node_name:
        return settings.node_name
    own = own_container() if kind == "cpu" and settings.sandbox == "docker" else None
    return own.service if own is not None and own.service else f"{socket.gethostname()}-{kind}"
