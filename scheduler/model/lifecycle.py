"""All life cycles of the scheduler, each as one table of transitions with their occasions.

Code that writes a state asks the table first, with `Lifecycle.next`. SQL, the command line and the docs use the words of these
tables. `app/journal/models.py` makes the constraints of the state columns from them. A new state also needs a migration, written by
hand. A migration records the tables of its own time, and must not change with the present words. A test compares the two.

*Draining* is a flag of a node, not a state (`Node.draining`, `nodes.draining`). An operator sets and clears the flag. The flag
stays whatever state the node is in: a node that comes back is still draining.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, Literal, TypeVar

End = Literal["succeeded", "failed", "timed_out", "cancelled", "rejected", "lost"]
ActionState = Literal["waiting", "running", End]
EnvironmentEnd = Literal["closed", "lost"]
EnvironmentState = Literal["waiting", "opening", "open", "closing", EnvironmentEnd]
NodeState = Literal["up", "silent", "lost", "left"]
ServiceState = Literal["absent", "starting", "resident", "evicting", "host", "restoring", "failed"]

S = TypeVar("S", bound=str)
E = TypeVar("E", bound=str)


class InvalidTransition(RuntimeError):
    """Raised when a thing is to enter a state that does not follow its present state."""


class Lifecycle(Generic[S, E]):
    """The states `S` of one kind of thing and the transitions between them. `E` are the final states.

    Parameters
    ----------
    thing
        The name of the thing that has these states, for messages.
    transitions
        For each state, the states that may follow, each with the occasion. `None` is the state before the first.

    """

    def __init__(self, thing: str, transitions: Mapping[S | None, Mapping[S, str]]) -> None:
        self.thing = thing
        self.transitions = transitions
        states = [to for following in transitions.values() for to in following]
        self.states: tuple[S, ...] = tuple(dict.fromkeys(states))
        self.ends: tuple[E, ...] = tuple(state for state in self.states if state not in transitions)  # type: ignore[misc]

    def after(self, state: S | None) -> frozenset[S]:
        """Return the states that may follow `state`."""
        return frozenset(self.transitions.get(state, ()))

    def next(self, state: S | None, to: S) -> S:
        """Return `to`, the state that something in `state` enters; `None` where it begins.

        Raises `InvalidTransition` when `to` does not follow `state`.
        """
        if to not in self.transitions.get(state, ()):
            raise InvalidTransition(f"{self.thing}: {to} does not follow {state or 'the beginning'}")
        return to


ACTION: Final[Lifecycle[ActionState, End]] = Lifecycle(
    "action",
    {
        None: {"waiting": "submitted"},
        "waiting": {
            "running": "granted",
            "succeeded": "closes an environment that has no node yet",
            "failed": "its environment is closed, or it is set aside",
            "timed_out": "its queue deadline is over",
            "cancelled": "cancelled",
            "rejected": "refused: it can never run, a queue is full, its header makes no sense",
            "lost": "its environment is lost, or it may not be tried once more",
        },
        "running": {
            "waiting": "its node was lost or never got it, or an outside API refused it, and it may run again",
            "succeeded": "its result says so",
            "failed": "its result says so, or it is set aside",
            "timed_out": "its result says so",
            "cancelled": "its result says so, or it was cancelled before it could wait again",
            "lost": "its node was lost and has stored no result, or does not know how it ended",
        },
    },
)

ENVIRONMENT: Final[Lifecycle[EnvironmentState, EnvironmentEnd]] = Lifecycle(
    "environment",
    {
        None: {"waiting": "`cpu.open` submitted"},
        "waiting": {
            "opening": "placed on a node",
            "closed": "closed, cancelled or too late before it was placed",
            "lost": "its opening is set aside",
        },
        "opening": {
            "open": "its node has opened it",
            "closed": "it could not be opened",
            "waiting": "its node was lost or could not open it, and it may open on another one",
            "lost": "its node was lost once too often, or its opening is set aside",
        },
        "open": {
            "closing": "`cpu.close`, lease over, trajectory cancelled, client gone, memory short; or it ended by itself while actions run",
            "lost": "its node was lost, or it ended by itself",
        },
        "closing": {"closed": "its node has closed it", "lost": "its node was lost, or the last action in a lost one has ended"},
    },
)

NODE: Final[Lifecycle[NodeState, NodeState]] = Lifecycle(
    "node",
    {
        None: {"up": "joined"},
        "up": {
            "silent": "three missed beats, or its worker hands over to the next one",
            "lost": "beats that never take up a grant, another worker that adopts nothing, or more silence than `TANGRAM_NODE_LOST_S`",
            "left": "its worker was stopped",
        },
        "silent": {
            "up": "it beats again",
            "lost": "no beat for `TANGRAM_NODE_LOST_S`, or another worker that adopts nothing",
            "left": "its worker was stopped",
        },
        "lost": {"up": "joined"},
        "left": {"up": "joined"},
    },
)

NODE_HELD: Final[tuple[NodeState, ...]] = ("up", "silent")
"""The states of a node whose actions and environments count."""

SERVICE: Final[Lifecycle[ServiceState, ServiceState]] = Lifecycle(
    "service",
    {
        None: {"absent": "its node declares it"},
        "absent": {"starting": "its cells are granted"},
        "starting": {"resident": "the model is loaded from its folder", "failed": "it is not"},
        "resident": {"evicting": "its cells or their memory are wanted, or it is stopped", "failed": "its process ended by itself"},
        "evicting": {
            "host": "its weights are in host memory",
            "absent": "its weights are dropped",
            "failed": "its weights are stuck",
            "resident": "calls did not end in time",
        },
        "host": {
            "restoring": "cells are granted",
            "absent": "host memory is wanted, or its copy goes to other cells",
            "failed": "its process ended by itself",
        },
        "restoring": {"resident": "the weights are back", "failed": "they are not"},
        "failed": {"starting": "another try from the folder", "absent": "it is stopped"},
    },
)
"""The life of one instance of a service, on its cells.

Workers report the states that they see, and may miss a state that passed quickly. An instance may take over the copy of an instance
on other cells. Its next report is then `restoring`, though it was `absent`. An instance that could not even begin is reported as
`failed`.
"""

MISSED_BEATS: Final = 3
"""Beats that a node may miss before it is silent, and beats in which it may show no sign of a grant."""

MOST_TRIES: Final = 2
"""Times that an action may lose its node. After that it is not tried again."""
