"""ARL-Tangram: what a trainer installs."""

from tangram.action import Action, Cost
from tangram.aio import AsyncClient, AsyncEnvironment
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
    "AsyncHandle",
    "Chunk",
    "Client",
    "ClientClosed",
    "Cost",
    "Environment",
    "EnvironmentLost",
    "ExecResult",
    "Flat",
    "Handle",
    "HttpAnswer",
    "InvalidAction",
    "Logprobs",
    "Response",
    "ResultNotReady",
    "Scores",
    "Settings",
    "Snapshot",
    "StackUnreachable",
    "Table",
    "TangramError",
    "Texts",
    "Unknown",
]
