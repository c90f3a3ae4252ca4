"""Control tasks: what the scheduler has a node do besides running actions. They come over the node's own queue.

And Celery's remote control as far as a node has a way of its own: a revoke comes to every worker. Celery's own has each worker store an
end of an action that runs on another node, or waits, and cannot terminate what runs in a thread. Its shutdown takes no more messages, tells
the scheduler nothing, and waits for what runs.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.utils.functional import maybe_list
from celery.worker.control import control_command
from celery.worker.state import requests, revoked

from app import action_task
from app.celery import app
from tangram.wire import GRANT_HEADER, WireRegrant
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


@control_command(variadic="task_id", signature="[id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def revoke(state: Any, task_id: str | list[str], terminate: bool = False, **_: Any) -> dict[str, str]:
    """Begin none of these actions; end those that run where they are to be terminated."""
    ids = maybe_list(task_id) or []
    revoked.update(ids)
    for request in filter(None, map(requests.get, ids)) if terminate else ():
        if (grant := request.request_dict.get(GRANT_HEADER)) is not None:
            this_node().stop(request.id, grant["attempt"], "terminated through Celery")
    return {"ok": f"{'terminate' if terminate else 'revoke'}: {', '.join(ids)}"}


@control_command(variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [id2 [... [idN]]]]")  # type: ignore[untyped-decorator]
def terminate(state: Any, task_id: str | list[str], **_: Any) -> dict[str, str]:
    """Begin none of these actions, and end those that run."""
    said: dict[str, str] = revoke(state, task_id, terminate=True)
    return said


@control_command()  # type: ignore[untyped-decorator]
def shutdown(state: Any, **_: Any) -> None:
    """End this worker as SIGTERM does."""
    os.kill(os.getpid(), signal.SIGTERM)
