"""Which environments and actions of a node go on when another worker goes on with the node.

| an action in an environment that the worker has adopted | goes on                                                        |
|---------------------------------------------------------|----------------------------------------------------------------|
| the worker says that it runs                            | as it was granted                                              |
| the worker before never claimed it                      | as it was granted: the node is asked for it, and it is sent again |
| anything else                                           | no: the worker before may have done some of it                 |

That nobody has claimed an action is known only while the store has all its claims. So the store must have been there since the grant.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from scheduler.live.descriptions import node_spec
from scheduler.live.transport import Transport
from scheduler.model import Running
from scheduler.model.state import State


def adopted_environments(state: State, description: Mapping[str, Any]) -> frozenset[str]:
    """Return the environments of a known node that its next worker has adopted; none where that worker offers something else."""
    node = state.nodes[description["name"]]
    if node_spec(description) != node.spec:
        return frozenset()
    return frozenset(one for one in description["environments"] if one in node.environments)


def actions_that_go_on(
    state: State, transport: Transport, description: Mapping[str, Any], adopted: Set[str], whole_since: float
) -> frozenset[str] | None:
    """Return the actions of a node that go on, as its new worker describes itself; None while the store does not say.

    `whole_since` is since when the store has lost no claims, as far as this scheduler knows.
    """
    of_node = [state.running[action_id] for action_id in state.nodes[description["name"]].running]
    kept = [each for each in of_node if each.waiting.action.environment in adopted and each.waiting.action.kind != "cpu.open"]
    running = {each.waiting.id for each in kept} & set(description["running"])
    open_to_all = {each.waiting.id: each.grant.attempt for each in kept if _may_be_unclaimed(each, whole_since)}
    claimed = transport.claimed({action_id: attempt for action_id, attempt in open_to_all.items() if action_id not in running})
    return None if claimed is None else frozenset(running | (open_to_all.keys() - running - claimed))


def _may_be_unclaimed(running: Running, whole_since: float) -> bool:
    return running.started_at is None and running.granted_at > whole_since
