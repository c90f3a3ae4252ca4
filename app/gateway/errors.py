"""How a call to the gateway fails, by whose fault it was; each shape says it in the words of its clients.

docs/gateway.md has the errors with their usual HTTP statuses. A program that exits with a code other than 0, or is out of time, is no
error: its result says so. Each error has the cause and the fault of `tangram/ends.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from redis import ConnectionError as RedisConnectionError
from redis import RedisError

from tangram.ends import fault_of
from tangram.errors import ActionCancelled, EnvironmentLost, TangramError

RETRY_AFTER_S = 2


class GatewayError(TangramError):
    """Base of the ways in which a call fails; `kind` is a word for machines, `status` the usual HTTP status.

    `headers` are those that an answer should have. `environment_lost` says that the environment of the call has ended by itself.
    """

    status = 500
    kind = "error"
    headers: ClassVar[Mapping[str, str]] = {}
    environment_lost = False

    def __init__(self, message: str = "", cause: str | None = None) -> None:
        """Keep the message, one line for a person, and the cause; without one it is the usual cause of such a failure."""
        super().__init__(message)
        if cause is not None:
            self.cause = cause


class BadRequest(GatewayError):
    """Raised when what was asked for is wrong, or could never run.

    `problem` names what is wrong, where an action was refused for it: `NoSuchFile`, `PathIsDirectory`, `FileTooLarge`,
    `FileUnusable`, `ImageMissing`, `BadInput` and so on, as in `workers/cpu/errors.py` and `workers/gpu/errors.py`.
    """

    status, kind, cause = 400, "bad_request", "bad_input"

    def __init__(self, message: str, problem: str = "", cause: str | None = None) -> None:
        super().__init__(message, cause)
        self.problem = problem


class KeyReused(BadRequest):
    """Raised when an idempotency key comes with another request than the first time."""

    status = 422

    def __init__(self) -> None:
        super().__init__("Idempotency-Key: was used for another request before: a key is for one request, sent any number of times")


class Unauthorized(GatewayError):
    """Raised when a call has no token, or none that counts."""

    status, kind, cause = 401, "unauthorized", "bad_input"


class NotFound(GatewayError):
    """Raised when there is no such thing for this caller, or no longer."""

    status, kind, cause = 404, "not_found", "environment_closed"


class EnvironmentGone(NotFound):
    """Raised when an environment of this caller has ended, by `cause`."""


class Cancelled(GatewayError):
    """Raised when the action was cancelled by somebody else than its caller."""

    status, kind, cause = 409, "cancelled", "cancelled"


class TooLarge(GatewayError):
    """Raised when a body is beyond the limit."""

    status, kind, cause = 413, "too_large", "bad_input"


class Overloaded(GatewayError):
    """Raised when a queue is full, when a call's time in it is over, or when there are too many calls at once."""

    status, kind, cause = 503, "overload", "queue_full"
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": str(RETRY_AFTER_S)}


class StillRunning(GatewayError):
    """Raised when a caller's patience is over while its action goes on."""

    status, kind = 504, "still_running"


class ProgramFailed(GatewayError):
    """Raised when the program did something to its environment after which there is no result."""

    status, kind = 422, "program"


class InfraFailed(GatewayError):
    """Raised when the system failed: a node died, the stack cannot be reached."""

    status, kind, cause = 502, "infra", "worker_failed"


def classify(error: Exception) -> GatewayError:
    """Return what the end of an action, or any other failure of a call, is for a caller, by its cause."""
    if isinstance(error, GatewayError):
        return error
    failure = _of_cause(error)
    failure.environment_lost = isinstance(error, EnvironmentLost)
    return failure


def _of_cause(error: Exception) -> GatewayError:
    text = str(error).encode("utf-8", "backslashreplace").decode("utf-8")  # It may quote what callers sent, which need not be text.
    match error:
        case TangramError():
            cause = error.cause or "worker_failed"
        case RedisConnectionError() if isinstance(error.__cause__, TimeoutError):  # the client's pool had none free for too long
            return Overloaded("there are too many calls at once: no connection to the result store was free in time", "stack_unreachable")
        case RedisError():
            cause = "stack_unreachable"
        case _:
            cause, text = "worker_failed", f"{type(error).__name__}: {text}"
    if isinstance(error, ActionCancelled) and error.fault != "infrastructure":
        return Cancelled(text, cause)
    match fault_of(cause), cause:
        case _, ("queue_full" | "queue_timeout"):
            return Overloaded(text, cause)
        case "caller", ("environment_closed" | "lease_over" | "cancelled" | "client_gone"):
            return EnvironmentGone(text, cause)
        case "caller", _:
            return BadRequest(text, getattr(error, "problem", ""), cause)
        case "program", _:
            return ProgramFailed(text, cause)
    return InfraFailed(text, cause)
