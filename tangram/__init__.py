"""ARL-Tangram: what a trainer installs.

A name is imported when it is first used. Redis and Celery take longer to import than most commands of the command line need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tangram.action import Action, Cost
    from tangram.aio import AsyncClient, AsyncEnvironment
    from tangram.calls import CallOptions, ExecOptions, Limits, OpenOptions, ServiceOptions
    from tangram.client import Client, Environment
    from tangram.elasticity import Amdahl, Flat, Table
    from tangram.errors import (
        ActionCancelled,
        ActionError,
        ActionFailed,
        ActionLost,
        ActionRefused,
        ActionRejected,
        ActionTimedOut,
        ClientClosed,
        EnvironmentLost,
        InvalidAction,
        ResultNotReady,
        StackUnreachable,
        TangramError,
        Unknown,
    )
    from tangram.file_scripts import FileInfo
    from tangram.files import AsyncFiles, Files
    from tangram.handles import AsyncHandle, Handle
    from tangram.results import Act, Chunk, ExecResult, HttpAnswer, Logprobs, Response, Scores, Snapshot, Texts
    from tangram.settings import Settings

__all__ = [
    "Act",
    "Action",
    "ActionCancelled",
    "ActionError",
    "ActionFailed",
    "ActionLost",
    "ActionRefused",
    "ActionRejected",
    "ActionTimedOut",
    "Amdahl",
    "AsyncClient",
    "AsyncEnvironment",
    "AsyncFiles",
    "AsyncHandle",
    "CallOptions",
    "Chunk",
    "Client",
    "ClientClosed",
    "Cost",
    "Environment",
    "EnvironmentLost",
    "ExecOptions",
    "ExecResult",
    "FileInfo",
    "Files",
    "Flat",
    "Handle",
    "HttpAnswer",
    "InvalidAction",
    "Limits",
    "Logprobs",
    "OpenOptions",
    "Response",
    "ResultNotReady",
    "Scores",
    "ServiceOptions",
    "Settings",
    "Snapshot",
    "StackUnreachable",
    "Table",
    "TangramError",
    "Texts",
    "Unknown",
]

_HOMES = ("errors", "elasticity", "settings", "results", "action", "calls", "handles", "file_scripts", "files", "client", "aio")
"""The modules that have these names: what imports little comes first. `tangram.errors` and the like are there without a further import."""

if not TYPE_CHECKING:  # or any name would be one

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        modules = (import_module(f"{__name__}.{home}") for home in _HOMES)
        value = globals()[name] = next(getattr(module, name) for module in modules if hasattr(module, name))
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
