"""What a worker sets up once and its tasks use: a sandbox, a host of services, an HTTP client. Kept in `app/runtime.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from app.runtime import runtime
from tangram.blobs import Blobs
from tangram.errors import ActionError, ActionFailed, ActionRefused, TangramError
from tangram.settings import Settings

if TYPE_CHECKING:
    from workers.api.requests import Requests
    from workers.cpu.abstract import Sandbox
    from workers.cpu.command_input import CommandInputs
    from workers.cpu.streams import OutputStreams
    from workers.gpu.host import ServiceHost
    from workers.gpu.prefetch import Prefetch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuContext:
    """What the tasks of a CPU node work with."""

    settings: Settings
    blobs: Blobs
    sandbox: Sandbox
    streams: OutputStreams
    inputs: CommandInputs

    def close(self, environment_id: str) -> None:
        """Close an environment if it is open."""
        self.sandbox.close_environment(environment_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuContext:
    """What the tasks of a GPU node work with."""

    settings: Settings
    blobs: Blobs
    host: ServiceHost
    prefetch: Prefetch


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """What the tasks of an API node work with."""

    settings: Settings
    blobs: Blobs
    requests: Requests


def provide(value: CpuContext | GpuContext | ApiContext) -> None:
    """Set up a context for this worker."""
    runtime().provide(type(value), value)


def context(kind: type[T]) -> T:
    """Return this worker's context. Raises `ActionFailed` when this worker is of another pool."""
    value = runtime().part(kind)
    if value is None:
        raise ActionFailed(f"this worker has no {kind.__name__}: the action was sent to the wrong pool")
    return value


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what a sandbox or an engine refuses into the end of the action, in the same words: by whose fault it is."""
    try:
        yield
    except ActionError:
        raise
    except TangramError as error:
        if error.fault == "caller":
            raise ActionRefused(str(error), type(error).__name__, error.cause) from error
        raise ActionFailed(str(error), error.cause) from error
