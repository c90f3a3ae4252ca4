"""Control tasks: what the scheduler has a node do besides running actions. They come over the node's own queue."""

from __future__ import annotations

from app import action_task
from app.celery import app
from tangram.wire import WireRegrant
from workers.node import Node


def this_node() -> Node:
    """Return the node of this worker. Raises `ActionFailed` where it is none."""
    node = action_task.this_node()
    assert isinstance(node, Node), "nothing else is provided as a worker's node"
    return node


@app.task(name="tangram.stop", ignore_result=True)  # type: ignore[untyped-decorator]
def stop(id: str, attempt: int, reason: str, cause: str = "cancelled") -> None:
    """Stop a running action."""
    this_node().stop(id, attempt, reason, cause)


@app.task(name="tangram.regrant", ignore_result=True)  # type: ignore[untyped-decorator]
def regrant(epoch: int, serial: int, grants: list[WireRegrant]) -> None:
    """Change the cores of running actions, in this order, or send them to the background; see `tangram.wire`."""
    this_node().regrant(epoch, serial, grants)


@app.task(name="tangram.let_go", ignore_result=True)  # type: ignore[untyped-decorator]
def let_go(incarnation: str) -> None:
    """Take note that the scheduler has sent this worker, which hands over, all that it gets."""
    this_node().let_go(incarnation)


@app.task(name="tangram.tell", ignore_result=True)  # type: ignore[untyped-decorator]
def tell(id: str, attempt: int) -> None:
    """Say how an action stands that the scheduler misses in a beat."""
    this_node().tell(id, attempt)
