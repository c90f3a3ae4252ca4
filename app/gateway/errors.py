"""How a call to the gateway fails, by whose fault it was; each shape says it in the words of its clients.

| error | means | usual HTTP status |
|---|---|---|
| `BadRequest` | what was asked for is wrong, or could never run | 400 |
| `Unauthorized` | no token, or none that counts | 401 |
| `NotFound` | there is no such thing for this caller, or no longer | 404 |
| `Cancelled` | somebody cancelled the action | 409 |
| `TooLarge` | a body is beyond the limit | 413 |
| `Overloaded` | a queue is full, or the call's time in it is over: to be tried again | 503 |
| `StillRunning` | the action goes on; the same request, sent again, waits for it | 504 |
| `InfraFailed` | the system failed, which says nothing about the program | 502 |

A program that fails is no error: its result says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from redis import RedisError

from tangram.errors import (
    ActionCancelled,
    ActionError,
    ActionLost,
    ActionRefused,
    ActionRejected,
    ActionTimedOut,
    EnvironmentLost,
    InvalidAction,
    StackUnreachable,
    TangramError,
)

RETRY_AFTER_S = 2


class GatewayError(TangramError):
    """Base of the ways in which a call fails; `kind` is a word for machines, `status` the usual HTTP status."""

    status = 500
    kind = "error"

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that an answer should have."""
        return {}


class BadRequest(GatewayError):
    """Raised when what was asked for is wrong, or could never run.

    `problem` names what is wrong, where an action was refused for it: `NoSuchFile`, `PathIsDirectory`, `PathOutside`, `FileTooLarge`,
    `FileUnusable`, `ImageMissing`, `BadInput` and so on, as in `workers/cpu/errors.py` and `workers/gpu/errors.py`.
    """

    status, kind = 400, "bad_request"

    def __init__(self, message: str, problem: str = "") -> None:
        """Keep the message, one line for a person, and the name of the problem."""
        super().__init__(message)
        self.problem = problem


class Unauthorized(GatewayError):
    """Raised when a call has no token, or none that counts."""

    status, kind = 401, "unauthorized"


class NotFound(GatewayError):
    """Raised when there is no such thing for this caller, or no longer."""

    status, kind = 404, "not_found"


class Cancelled(GatewayError):
    """Raised when the action was cancelled by somebody else than its caller."""

    status, kind = 409, "cancelled"


class TooLarge(GatewayError):
    """Raised when a body is beyond the limit."""

    status, kind = 413, "too_large"


class Overloaded(GatewayError):
    """Raised when a queue is full, or when a call's time in it is over."""

    status, kind = 503, "overload"

    @property
    def headers(self) -> Mapping[str, str]:
        """Say when to come again."""
        return {"Retry-After": str(RETRY_AFTER_S)}


class StillRunning(GatewayError):
    """Raised when a caller's patience is over while its action goes on."""

    status, kind = 504, "still_running"


class InfraFailed(GatewayError):
    """Raised when the system failed: a node died, the stack cannot be reached. `cause` names the class of failure."""

    status, kind = 502, "infra"

    def __init__(self, message: str, cause: str = "failed") -> None:
        """Keep the message, one line for a person, and the cause, one word for counting."""
        super().__init__(message)
        self.cause = cause


def classify(error: Exception) -> GatewayError:
    """Return what the end of an action, or any other failure of a call, is for a caller."""
    text = str(error)
    match error:
        case GatewayError():
            return error
        case InvalidAction():
            return BadRequest(text)
        case EnvironmentLost():
            return InfraFailed(text, "environment_lost")
        case ActionLost():
            return InfraFailed(text, "action_lost")
        case ActionCancelled():
            return Cancelled(text)
        case ActionRejected():
            return Overloaded(text) if text.endswith("actions waiting already") else BadRequest(text)
        case ActionTimedOut():
            return Overloaded(text) if text.startswith("waited longer than queue_timeout_s") else InfraFailed(text, "timed_out")
        case ActionRefused():
            return BadRequest(text, error.problem)
        case ActionError():
            return _failed(text)
        case StackUnreachable() | RedisError():
            return InfraFailed(text, "stack_unreachable")
    return InfraFailed(f"{type(error).__name__}: {text}", "error")


def _failed(text: str) -> GatewayError:
    """Tell an environment that is gone from a failure of the system."""
    if text.startswith("environment ") and any(
        word in text for word in (" is unknown: ", " was closed ", " is being closed: ", " is gone: ")
    ):
        return NotFound(text)
    return InfraFailed(text, "failed")
