"""Every error a trainer can see, named by what ended and why.

Two families. `InvalidAction` and its kin are raised before anything was sent: the caller's words were
wrong. `ActionError` and its kin say how an action that was sent has ended; they travel through the Celery
result backend by class name, so each can be rebuilt from its arguments, which are strings.

Each has a `cause` and a `fault`, which are words of `tangram/ends.py`.
"""

from __future__ import annotations

from pydantic import ValidationError

from tangram.ends import Fault, cause_of, fault_of


class TangramError(Exception):
    """Base of all errors of this project; `cause` says why, in one word, where that is known."""

    cause: str = ""

    @property
    def fault(self) -> Fault:
        """Whose fault it is, as far as the cause is known: the program's, the infrastructure's or the caller's."""
        return fault_of(self.cause)


class InvalidAction(TangramError, ValueError):
    """Raised when an action is described wrongly; the message starts with the field's name."""

    cause = "bad_input"

    def __init__(self, field: str, problem: str = "") -> None:
        super().__init__(f"{field}: {problem}" if problem else field)
        self.field = field


class ArgumentsTooLong(InvalidAction):
    """Raised when the arguments or variables of a program are longer than Linux hands to one."""


class StackUnreachable(TangramError, ConnectionError):
    """Raised when the broker or the result store cannot be reached. What was asked for is not done."""

    cause = "stack_unreachable"


class Unknown(TangramError, ConnectionError):
    """Raised when the broker or the result store was away for too long to say how an action ends, which had perhaps been sent.

    The client withdraws the action as soon as it can: it cancels it, and closes its environment where it is an open. An action that was
    submitted under an id of the caller's goes on.
    """

    cause = "stack_unreachable"

    def __init__(self, reason: str = "", id: str = "") -> None:
        """Keep the `reason`, one sentence for a person, and the `id` of the action."""
        super().__init__(reason, id)
        self.reason, self.id = reason, id

    def __str__(self) -> str:
        return f"{self.reason}; nobody knows yet how action {self.id} ends"


class ClientClosed(TangramError, RuntimeError):
    """Raised when a client is used after it was closed, or closed before an action had its result."""


class ResultNotReady(TangramError, TimeoutError):
    """Raised when `result(timeout_s=…)` ran out of time; the action itself goes on."""


class ActionError(TangramError):
    """Base of the ways in which an action ends without a result."""

    status = "failed"

    def __init__(self, reason: str = "", cause: str = "") -> None:
        """Keep the `reason`, one sentence for a person, and the `cause`; without one it is the usual cause of such an end."""
        if type(self) is ActionError:
            raise TypeError("ActionError is abstract: raise the way the action ended")
        # Celery and pickle rebuild an error from its arguments.
        super().__init__(*([reason, cause] if cause else [reason]))
        self.reason = reason
        self.cause = cause_of(self.status, cause)

    def __str__(self) -> str:
        return self.reason


class ActionFailed(ActionError):
    """Raised when an action could not be carried out, e.g. its environment was closed before."""

    status = "failed"


class ActionRefused(ActionFailed):
    """Raised when what an action asks for is wrong, e.g. a file that does not exist, or an item that a model cannot take.

    Nothing is wrong with the system: the same action would end so again.
    """

    def __init__(self, reason: str = "", problem: str = "", cause: str = "bad_input") -> None:
        """Keep the `reason`, one sentence for a person, and the name of the `problem`: `NoSuchFile`, `BadInput` and so on."""
        super().__init__(reason, cause)
        self.problem = problem
        self.args = (reason, problem, cause)


class ActionTimedOut(ActionError, TimeoutError):
    """Raised when an action without partial output ran past its timeout."""

    status = "timed_out"


class ActionCancelled(ActionError):
    """Raised when an action was cancelled before it had a result."""

    status = "cancelled"


class ActionRejected(ActionError):
    """Raised when the scheduler refused an action at once: bounds of a queue, impossible demands."""

    status = "rejected"


class ActionLost(ActionError):
    """Raised when the node of an action died and the action may not be run a second time."""

    status = "lost"


class EnvironmentLost(ActionLost):
    """Raised for every action on an environment that is lost: its node died, or it ended by itself there.

    Its files and processes are gone, so no action on it can run again: open another environment and start the rollout anew.
    """

    def __init__(self, reason: str = "", node: str = "", cause: str = "environment_lost") -> None:
        """Keep the `reason`, one sentence for a person, and the name of the `node` that the environment stood on."""
        super().__init__(reason, cause)
        self.node = node
        self.args = (reason, node, cause)


BY_STATUS: dict[str, type[ActionError]] = {
    error.status: error for error in (ActionFailed, ActionTimedOut, ActionCancelled, ActionRejected, ActionLost)
}
"""The error of each way to end without a result."""


def first_problem(error: ValidationError) -> str:
    """Say in one line what is wrong first with what was not a valid message."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where or 'message'}: {first['msg']}, not {first['input']!r:.80}"
