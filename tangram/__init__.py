"""ARL-Tangram: what a trainer installs."""

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
from tangram.session import ClientClosed
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
