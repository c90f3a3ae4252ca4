"""Opens that a node could not carry out: they wait for another node, and the node rests."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.nodes import may_open_elsewhere
from scheduler.core.open_order import LONGEST_REST_S, SHORTEST_REST_S
from scheduler.model import commands, events


def fails(w: Any, environment: str, reason: str = "its disk is full") -> None:
    """Have the node of an open report that it could not carry it out, as a worker does."""
    id = f"open-{environment}"
    again = may_open_elsewhere(w.core.state, w.core.state.running[id].waiting.action, w.grants[id])
    w.finish(id, "failed", reason=reason, cause="sandbox_failed", waits_again=again)


def test_an_open_that_failed_goes_to_another_node_and_its_node_rests(world: Any) -> None:
    # Given a node that cannot open anything, and is preferred since nothing stands on it
    w = world().node("sick").node("well")
    w.open("other")
    first = w.core.state.environments["other"].node
    w.open("e0", finish=False)
    sick = w.grants["open-e0"].node
    assert sick != first
    fails(w, "e0")
    # Then the other node opens it, and all that come while the first one rests
    assert w.grants["open-e0"].node == first
    assert [one.reason for one in w.of(commands.Requeue)] == [f"node {sick} could not open it: its disk is full"]
    w.finish("open-e0")
    w.several(w.open, "e", range(1, 5))
    assert {w.core.state.environments[f"e{number}"].node for number in range(5)} == {first}
    w.tick(SHORTEST_REST_S)
    w.open("later")
    assert w.core.state.environments["later"].node == sick


def test_rests_grow_while_opens_fail_and_begin_anew_after_one_that_succeeded(world: Any) -> None:
    w = world().node("n0", cores=64, labels=frozenset({"large"})).node("n1", cores=1)
    rests = []
    for number, ends_well in enumerate((False, False, False, False, False, False, True, False)):
        # When the large node, which is preferred, fails on an open
        w.open(f"e{number}", finish=False)
        assert w.grants[f"open-e{number}"].node == "n0"
        fails(w, f"e{number}")
        began = w.now
        w.finish(f"open-e{number}")
        # Then an open that only it could carry out waits until it has rested
        w.open(f"probe{number}", finish=False, requires=("large",))
        while f"open-probe{number}" not in w.grants:
            w.wake()
        rests.append(w.now - began)
        w.finish(f"open-probe{number}", "succeeded" if ends_well else "cancelled")

    assert rests == [SHORTEST_REST_S, 10.0, 20.0, 40.0, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S, SHORTEST_REST_S]


def test_an_open_fails_after_three_nodes_and_where_there_is_no_other_node(world: Any) -> None:
    w = world().node("n0").node("n1").node("n2").node("n3")
    w.open("e0", finish=False)
    tried = []
    for _ in range(3):
        tried.append(w.grants["open-e0"].node)
        fails(w, "e0", "no engine")
    # Then three have tried, and the trainer is told what the last one said
    assert len(set(tried)) == 3
    assert (w.ends["open-e0"].status, w.ends["open-e0"].reason, w.ends["open-e0"].cause) == ("failed", "no engine", "sandbox_failed")
    # And an open for which there is one node fails at once
    w = world().node("n0").node("small", memory_mb=10).node("api", pools=("api",))
    w.open("e1", finish=False, memory_mb=100)
    fails(w, "e1")
    assert w.ends["open-e1"].status == "failed"
    w.open("e2", memory_mb=100)
    assert w.core.state.environments["e2"].state == "open"


def test_opens_that_fail_on_all_nodes_keep_no_other_job_waiting(world: Any) -> None:
    # Given opens that no node can carry out, such as of an image without a shell
    w = world().node("n0").node("n1").node("n2")
    for number in range(4):
        w.open(f"bad{number}", finish=False, job="bad")
        for _ in range(3):
            fails(w, f"bad{number}")
        assert w.ends[f"open-bad{number}"].status == "failed"
    w.several(w.open, "e", 3, job="good")
    assert {w.core.state.environments[f"e{number}"].node for number in range(3)} == {"n0", "n1", "n2"}


def test_a_node_rests_on_where_it_alone_has_failed(world: Any) -> None:
    # Given two nodes, of which one is full, and the other one cannot open anything
    w = world().node("n0", memory_mb=1000).node("n1", memory_mb=1000)
    w.open("whole", finish=False, memory_mb=1000)
    sick = next(name for name in ("n0", "n1") if name != w.grants["open-whole"].node)
    w.finish("open-whole")
    w.open("e0", finish=False, memory_mb=100)
    for _ in range(3):
        while "open-e0" not in w.grants:
            w.wake()
        assert w.grants["open-e0"].node == sick
        fails(w, "e0")
    # Then the end of the open ends no doubling
    assert w.core.state.nodes[sick].rest_s == 2 * SHORTEST_REST_S


@pytest.mark.parametrize("unwanted", [events.Cancelled(ids=("open-e0",)), events.ClientGone(client="c", reason="silent")])
def test_an_open_that_nobody_wants_any_more_does_not_go_elsewhere(world: Any, unwanted: events.Event) -> None:
    w = world().node("n0").node("n1")
    w.open("e0", finish=False, client="c")
    w.handle(unwanted)
    fails(w, "e0")
    # No result is stored, so the scheduler stores one
    assert (w.ends["open-e0"].status, w.ends["open-e0"].by_worker) == ("cancelled", False)
    assert w.core.state.environments == {}


def test_an_environment_that_is_closed_says_nothing_of_the_next_open_there(world: Any) -> None:
    # Given a node that could not open an environment, beside one that stands on it
    w = world().node("n0").node("n1").open("a").open("b")
    w.open("e0", finish=False)
    sick = w.grants["open-e0"].node
    fails(w, "e0")
    # When that one is closed; then the next failure still doubles the rest
    w.close(next(name for name in ("a", "b") if w.core.state.environments[name].node == sick), finish=True)
    assert w.core.state.nodes[sick].rest_s == SHORTEST_REST_S


def dies(w: Any, *environments: str, cause: str = "environment_lost") -> str:
    """Have a node say that environments have ended by themselves; return the node."""
    node = str(w.core.state.environments[environments[0]].node)
    left = frozenset(w.core.state.nodes[node].environments) - {*environments}
    lost = tuple(events.Loss(id=environment, reason="its container ended", cause=cause) for environment in environments)
    w.handle(events.NodeBeat(name=node, running=frozenset(), environments=left, lost=lost))
    return node


def test_a_node_on_which_environments_die_gets_the_next_ones_later_and_later_until_one_ends_well(world: Any) -> None:
    # Given a node that is preferred since it is empty, and on which environments die once they stand
    w = world().node("sick").node("well").open("e")
    well, rests = w.core.state.environments["e"].node, []
    for number, one_ends_well_before in enumerate((False, False, True, False)):
        if one_ends_well_before:
            w.open("fine")
            w.close("fine", finish=True)
        w.open(f"e{number}")
        sick = dies(w, f"e{number}")
        # Then the other node gets what is opened meanwhile
        w.open(f"meanwhile{number}")
        assert sick != well == w.core.state.environments[f"meanwhile{number}"].node
        rests.append(w.core.state.nodes[sick].rests_until - w.now)
        w.close(f"meanwhile{number}", finish=True)
        w.tick(rests[-1])
    assert rests == [SHORTEST_REST_S, 2 * SHORTEST_REST_S, SHORTEST_REST_S, 2 * SHORTEST_REST_S]


def test_no_node_rests_for_a_job_whose_environments_die_everywhere_nor_for_what_programs_did_nor_where_it_is_alone(world: Any) -> None:
    # Given a job whose environments die on two nodes
    w = world().node("n0").node("n1")
    w.open("e0").open("e1")
    assert {dies(w, "e0"), dies(w, "e1")} == {"n0", "n1"}
    # Then another job's begin at once on both
    w.open("g0", job="good").open("g1", job="good")
    assert {w.core.state.environments[name].node for name in ("g0", "g1")} == {"n0", "n1"}
    # And after an end by the fault of a program
    dies(w, "g0", cause="out_of_memory")
    assert not any(node.rests_until > w.now for node in w.core.state.nodes.values())
    # And on a node that is the only one
    w = world().node("n0")
    w.open("e0")
    dies(w, "e0")
    w.open("e1")
    assert w.core.state.environments["e1"].state == "open"
    w = world().node("n0", labels=("gpu",)).node("n1")
    w.open("e0", requires=["gpu"])
    dies(w, "e0")
    w.open("e1", requires=["gpu"])
    assert w.core.state.environments["e1"].state == "open"


def test_environments_that_die_together_count_once(world: Any) -> None:
    w = world().node("n0").node("n1")
    w.several(w.open, "e", 8)
    together = [name for name, environment in w.core.state.environments.items() if environment.node == "n0"]
    assert len(together) > 1
    assert dies(w, *together) == "n0"
    assert w.core.state.nodes["n0"].rests_until - w.now == SHORTEST_REST_S
