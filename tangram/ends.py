"""Why an action ends as it does, and whose fault that is: one table, which core, journal, client and gateway share.

Each end has a *cause*, a word of `CAUSES`, unless all went well. The cause says whose *fault* the end is:

| fault | means | the trainer |
|---|---|---|
| `program` | what ran in the environment did this to itself | may score it: the rollout has earned it |
| `infrastructure` | a part of this system, or an outside service, failed | must not score it: it says nothing of the program |
| `caller` | whoever sent the action gave it up, or asked for what is wrong or never possible | mends the call |

An action that succeeds has no fault. The exception is a command that exits with a code other than 0. It is the program's fault, by the
cause `exit`. So operators can tell failures of ours from failures of programs by one column.

An exception that a worker does not expect is ours in the tasks of this system. In a task that users have declared it is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Fault = Literal["", "program", "infrastructure", "caller"]

FAULTS: Final[tuple[Fault, ...]] = ("", "program", "infrastructure", "caller")

Advice = Literal[
    "score it", "retry the action", "restart the rollout", "try again later", "mend the call", "mend the deployment", "drop it"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One cause: the `ends` that it leads to, whose `fault` it is, and what a trainer should do.

    It has no ends where only calls to the stack fail by it, not actions.
    """

    ends: tuple[str, ...]
    fault: Fault
    meaning: str
    advice: Advice


def _program(ends: str, meaning: str) -> Cause:
    return Cause(ends=tuple(ends.split()), fault="program", meaning=meaning, advice="score it")


def _ours(ends: str, meaning: str, advice: Advice = "retry the action") -> Cause:
    return Cause(ends=tuple(ends.split()), fault="infrastructure", meaning=meaning, advice=advice)


def _caller(ends: str, meaning: str, advice: Advice = "mend the call") -> Cause:
    return Cause(ends=tuple(ends.split()), fault="caller", meaning=meaning, advice=advice)


CAUSES: Final[Mapping[str, Cause]] = {
    "exit": _program("succeeded", "The command ended with an exit code other than 0."),
    "timeout": _program("timed_out", "The program ran longer than `timeout_s`, or printed nothing for `output_timeout_s`."),
    "out_of_memory": _program("succeeded lost", "The program filled the memory of its environment, and the kernel ended processes there."),
    "disk_limit": _program("failed lost", "The program wrote more to disk than its environment may."),
    "no_answer": _program(
        "failed", "No server of the environment listens on the port of a request, or its answer is no HTTP, or too large."
    ),
    "error": _program("failed", "A task that users have declared raised an exception."),
    "node_lost": _ours("lost", "The node of the action was lost, and the action may not run a second time."),
    "environment_lost": _ours(
        "lost failed", "The environment of the action was lost: its node died, or it ended there.", "restart the rollout"
    ),
    "memory_short": _ours(
        "lost failed cancelled", "The node had no memory left for the environments on it, and this one was ended.", "restart the rollout"
    ),
    "end_unknown": _ours("lost", "Its node does not know how the action ended, or cannot take it up."),
    "sandbox_failed": _ours("failed", "A sandbox, a container or the engine of containers did not do what it was asked for."),
    "open_timeout": _ours("timed_out failed", "The environment did not stand within the time for opening it."),
    "engine_failed": _ours("failed", "The engine of a service failed or died, or its cells did not have the memory for it."),
    "engine_timeout": _ours("timed_out", "A service computed for longer than `timeout_s`."),
    "service_gone": _ours("rejected", "No node declares the service any more.", "mend the deployment"),
    "api_failed": _ours("failed", "An outside API could not be reached, or broke off its answer."),
    "api_timeout": _ours("timed_out", "An outside API did not answer within `timeout_s`."),
    "worker_failed": _ours("failed", "A worker, or the gateway, raised an exception that it does not know."),
    "missing_tool": _ours("", "A language's tool is not in the image where the gateway runs its programs.", "mend the deployment"),
    "result_lost": _ours("failed", "The result of the action, or one of its large arguments, cannot be read or has expired."),
    "set_aside": _ours("failed cancelled lost", "Schedulers failed on a message of the action, so that was set aside.", "drop it"),
    "stack_unreachable": _ours("", "The broker, the result store or the journal cannot be reached.", "try again later"),
    "queue_timeout": _ours("timed_out failed", "The action waited longer than its `queue_timeout_s`.", "try again later"),
    "queue_full": _caller("rejected", "The job has as many actions waiting as it may.", "try again later"),
    "impossible": _caller("rejected failed", "No node could ever run the action: its amounts, labels, service, quota or task."),
    "bad_input": _caller("rejected failed", "What the action asks for is wrong, such as a file that does not exist."),
    "image_missing": _caller("failed", "The image of the environment is neither on the node nor to be had."),
    "environment_closed": _caller("failed cancelled", "The environment is closed or being closed, or was never opened."),
    "lease_over": _caller("failed cancelled", "The lease of the environment ended."),
    "cancelled": _caller("failed cancelled", "The trainer cancelled the action, its trajectory or its job.", "drop it"),
    "client_gone": _caller("failed cancelled", "The client of the action gave no sign of life for too long.", "drop it"),
}
"""Every cause, by its word, the program's first. Words of SQL, JSON and metrics; docs/ends.md has the same table."""

NO_CAUSE: Final = ""

UNBLAMED: Final = "cpu.close"
"""The kind whose ends are nobody's fault: a close of an environment that is lost or closed asks for what has come about."""

CLOSED_ANYWAY: Final = ("lease_over", "cancelled", "client_gone")
"""Causes by which an environment is closed that nobody has asked to close."""

USUAL: Final[Mapping[str, str]] = {
    "succeeded": NO_CAUSE,
    "failed": "worker_failed",
    "timed_out": "timeout",
    "cancelled": "cancelled",
    "rejected": "impossible",
    "lost": "node_lost",
}
"""The cause of each end where nobody names one, as older workers do not."""


def fault_of(cause: str) -> Fault:
    """Return whose fault a cause is; empty for none, and for a word that is no cause."""
    known = CAUSES.get(cause)
    return known.fault if known is not None else ""


def advice_of(cause: str) -> str:
    """Return what a trainer should do about a cause; empty for none, and for a word that is no cause."""
    known = CAUSES.get(cause)
    return known.advice if known is not None else ""


def fault_of_end(kind: str, cause: str) -> Fault:
    """Return whose fault it counts as that an action of this kind ended by `cause`."""
    return "" if kind == UNBLAMED else fault_of(cause)


def loss_cause(cause: str) -> str:
    """Return the cause by which actions are lost whose environment is lost by `cause`: the program's, a want of memory, else the loss."""
    return cause if fault_of(cause) == "program" or cause == "memory_short" else "environment_lost"


def cause_of(end: str, said: str) -> str:
    """Return `said` if that is a cause, else the usual cause of this end."""
    return said if said in CAUSES else USUAL.get(end, NO_CAUSE)
