"""The kinds of sandboxes, and an environment of each: the promises of `workers/cpu/abstract.py` are tested once for all of them.

What only one kind has is tested in `tests/workers_cpu` and `tests/containers`. Where bubblewrap or an engine is missing, their tests are
skipped; with CI set they fail. Those of containers have the marker `real`, and so have those of bubblewrap where there are the same of
plain processes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, Literal

import pytest

from tests.containers.conftest import need_containers, node_name
from tests.containers.images import make_busybox, make_with_python, make_with_shell
from tests.needed import needed
from tests.workers_cpu.conftest import make
from tests.workers_cpu.support import printed
from workers.cpu.abstract import Environment, EnvironmentSpec, Sandbox
from workers.cpu.docker.options import ContainerLimits, ContainerOptions
from workers.cpu.docker.sandbox import ContainerSandbox
from workers.cpu.errors import EnvironmentGone
from workers.cpu.process.isolation import Isolation


@dataclass(frozen=True)
class Kind:
    """A kind of sandbox, and what it does otherwise than the others."""

    name: str
    isolation: Isolation | None = None
    """None for containers."""
    network: Literal["host", "environment"] = "host"
    """What has a loopback of its own."""
    has_own_root: bool = False
    """Whether `/` is the environment's own: no path then leads anywhere else."""
    parks: bool = False
    """Whether what commands left running has a small part of a core, rather than what others leave idle."""
    has_snapshots: bool = False

    @property
    def is_container(self) -> bool:
        """Whether its environments are containers, which are slow to make."""
        return self.isolation is None


KINDS = {
    kind.name: kind
    for kind in (
        Kind("process", "none"),
        Kind("bubblewrap", "bubblewrap", "environment", has_own_root=True),
        Kind("view", "view", "environment", has_own_root=True),
        Kind("container", None, "environment", has_own_root=True, parks=True, has_snapshots=True),
    )
}


def params(*places: str) -> list[object]:
    """Return parameters: a kind, with a shell as in `process-sh`, or with `elastic` memory. What processes show is shown `real` again."""
    again = ("bubblewrap", "container") if any(place.startswith("process") for place in places) else ("container",)
    return [pytest.param(place, id=place, marks=pytest.mark.real if place.startswith(again) else ()) for place in places]


EVERY_KIND = params("process", "bubblewrap", "container")
EVERY_SHELL = params("process-bash", "process-sh", "container-busybox")
"""Each kind of shell, and each of the two ways to have one carry out commands; bubblewrap, and bash in containers, are shown by `env`."""

BASH = params("process-bash", "container-bash")

own_root = pytest.mark.parametrize("place", params("bubblewrap", "container"))
"""For what plain processes do not promise: their commands reach the host, and so do their files."""

MAX_FILE_BYTES = 1 << 20
"""The most that passes in or out of the sandboxes of these tests in one piece."""

Boxes = Callable[[str], Sandbox]
numbers = count()


@cache
def image_of(shell: str) -> str:
    """Return the name of an image with a shell; without one in particular, of an image with python3, make and this machine's sh."""
    need_containers()
    needed("" if shutil.which("make") and shutil.which("ldd") else "there is no make, or no ldd")
    name = f"tangram-test-sandboxes-{shell or 'python'}:1"
    if not shell:
        make_with_python(name)
    elif shell == "busybox":
        make_busybox(name)
    else:
        make_with_shell(shell, name)
    return name


def container_options(**more: object) -> ContainerOptions:
    limits = ContainerLimits(memory_mb=512, processes=256, disk_mb=256)
    return ContainerOptions(image=image_of(""), pull="never", limits=limits, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Boxes]:
    """Return what gives the sandbox that tests of a kind, or of a kind and a shell, share; none of them may harm it."""
    with ExitStack() as stack:

        @cache
        def find(place: str) -> Sandbox:
            name, _, shell = place.partition("-")
            folder, kind = tmp_path_factory.mktemp(place) / "box", KINDS[name]
            more: dict[str, Any] = {"max_file_bytes": MAX_FILE_BYTES, "memory": "elastic" if shell == "elastic" else "fixed"}
            if kind.isolation is None:
                box: Sandbox = ContainerSandbox(folder, node=node_name(f"suite{shell}"), options=container_options(), **more)
            else:
                box = make(folder, kind.isolation, shell="sh" if shell == "sh" else None, **more)
                if name == "view":
                    box._users = None  # as a worker has it that is not root
            stack.enter_context(contextlib.closing(box))
            return box

        yield lambda place: find("container" if place.startswith("container") and not place.endswith("elastic") else place)


def opened(box: Sandbox, place: str) -> Iterator[Environment]:
    """Give an environment in which nothing has run. Tests share a container: it is emptied, since making one takes longer than they do."""
    name, _, shell = place.partition("-")
    if not KINDS[name].is_container:
        environment = box.open(EnvironmentSpec(id=f"e{next(numbers)}"))
        yield environment
        environment.close()
        return
    environment = box.open(EnvironmentSpec(id=f"shared-{shell}", image=image_of(shell)))
    printed(environment, "cd; chmod -R u+rwx .; rm -rf ./* ./.[!.]* /tmp/* /tmp/.[!.]* /dev/shm/*", session="emptied")
    environment.close_session("emptied")
    yield environment
    with contextlib.suppress(EnvironmentGone):
        for session in tuple(environment._sessions):  # type: ignore[attr-defined]
            environment.close_session(session)


@pytest.fixture(params=EVERY_KIND)
def place(request: pytest.FixtureRequest) -> str:
    """Give the name of each kind. A file of tests may have other places, such as a kind and a means, as in `process-affinity`."""
    return str(request.param)


@pytest.fixture
def kind(place: str) -> Kind:
    return KINDS[place.partition("-")[0]]


@pytest.fixture
def sandbox(place: str, boxes: Boxes) -> Sandbox:
    return boxes(place)


@pytest.fixture
def env(kind: Kind, sandbox: Sandbox) -> Iterator[Environment]:
    yield from opened(sandbox, kind.name)


@pytest.fixture(params=EVERY_SHELL)
def shell_env(request: pytest.FixtureRequest, boxes: Boxes) -> Iterator[Environment]:
    """Give an environment of each kind with each kind of shell."""
    yield from opened(boxes(request.param), request.param)


@pytest.fixture(params=BASH)
def bash_env(request: pytest.FixtureRequest, boxes: Boxes) -> Iterator[Environment]:
    yield from opened(boxes(request.param), request.param)
