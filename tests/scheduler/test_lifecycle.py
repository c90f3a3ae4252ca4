"""The tables of life cycles: what they allow, and that what writes states asks them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from scheduler.core.core import Core
from scheduler.live.command_executor import CommandExecutor
from scheduler.live.entries import ActionRequeued, EnvironmentChanged, NodeChanged
from scheduler.model import Grant, commands
from scheduler.model.lifecycle import (
    ACTION,
    ENVIRONMENT,
    NODE,
    SERVICE,
    ActionState,
    End,
    EnvironmentEnd,
    EnvironmentState,
    InvalidTransition,
    Lifecycle,
    NodeState,
    ServiceState,
)
from scheduler.policies import make_policy

from .deployed import MESSAGE, Broker, Written

FINISH: Any = {"by_worker": True, "started_at": None, "queue_s": 0.0, "overhead_s": 0.0, "execution_s": 0.0, "cpu_s": 0.0, "dop": 1}
ENVIRONMENT_OF: Any = {"node": "n", "job": "j", "trajectory": "t", "memory_mb": 1, "pod_core_ids": ()}


def words(*kinds: Any) -> set[str]:
    """Return the words of literals, and of unions of them."""
    return {word for kind in kinds for word in ([kind] if isinstance(kind, str) else words(*get_args(kind)))}


@pytest.mark.parametrize(
    ("life", "states", "ends"),
    [(ACTION, ActionState, End), (ENVIRONMENT, EnvironmentState, EnvironmentEnd), (NODE, NodeState, ""), (SERVICE, ServiceState, "")],
)
def test_the_words_of_a_table_are_those_of_its_type(life: Lifecycle[Any, Any], states: Any, ends: Any) -> None:
    assert set(life.states) == words(states)
    assert set(life.ends) == (words(ends) if ends else set())


def start(action: str) -> commands.Command:
    return commands.Start(id=action, grant=Grant(node="n", core_ids=(1,), units=1))


def finish(action: str, status: End) -> commands.Command:
    return commands.Finish(id=action, status=status, reason="", **FINISH)


def environment(state: EnvironmentState) -> commands.Command:
    return commands.NoteEnvironment(id="e", state=state, **ENVIRONMENT_OF)


def node(state: NodeState) -> commands.Command:
    return commands.NoteNode(name="n", state=state)


REFUSED: dict[str, list[commands.Command]] = {
    "an action that nobody submitted starts": [start("unknown")],
    "an action starts twice": [start("a"), start("a")],
    "an action ends twice": [finish("a", "succeeded"), finish("a", "failed")],
    "an action waits again that never ran": [commands.Requeue(id="a", reason="")],
    "a running action is rejected": [start("a"), finish("a", "rejected")],
    "an environment opens that nobody asked for": [environment("open")],
    "an environment closes before it stands": [*map(environment, ("waiting", "opening", "closing"))],
    "a closed environment is lost": [*map(environment, ("waiting", "opening", "open", "closing", "closed", "lost"))],
    "a node is lost that has left": [*map(node, ("up", "left", "lost"))],
    "a node joins that is up": [*map(node, ("up", "up"))],
}


def executor_of(journal: Any) -> CommandExecutor:
    """Return an executor with an action that waits."""
    executor = CommandExecutor(Core(make_policy("fcfs")), Broker().transport(1), journal, 1)
    executor.keep("a", MESSAGE, 0.0)
    return executor


@pytest.mark.parametrize("commands", REFUSED.values(), ids=REFUSED)
def test_what_the_core_decides_against_the_tables_is_not_carried_out(commands: list[commands.Command]) -> None:
    # When the core decides what may be, it is carried out
    executor = executor_of(Written())
    for command in commands[:-1]:
        executor.carry_out(command, 1.0)
    with pytest.raises(InvalidTransition):
        executor.carry_out(commands[-1], 1.0)


def test_what_begins_anew_begins_from_the_beginning() -> None:
    journal = Written()
    executor = executor_of(journal)
    states: list[EnvironmentState] = ["waiting", "opening", "waiting", "opening", "open", "open", "closing", "closed", "waiting", "closed"]
    twice = [start("a"), commands.Requeue(id="a", reason=""), start("a"), finish("a", "lost")]
    for command in [*map(node, ("up", "lost", "up", "left", "up")), *map(environment, states), *twice]:
        executor.carry_out(command, 1.0)
    executor.write()
    assert [entry.state for entry in journal.entries if isinstance(entry, EnvironmentChanged)] == states
    assert [entry.state for entry in journal.entries if isinstance(entry, NodeChanged)] == ["up", "lost", "up", "left", "up"]
    assert sum(isinstance(entry, ActionRequeued) for entry in journal.entries) == 1
