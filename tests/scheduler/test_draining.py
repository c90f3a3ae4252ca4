"""A node that an operator drains: nothing more begins there, what is there comes to its end, and undoing has everything go on."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.core.open_order import KEPT_AFTER_S
from scheduler.cpu.tuning import TUNING
from scheduler.gpu.ageing import bound_s
from scheduler.model import NodeSpec, QuotaSpec, ServiceSpec, commands, events
from scheduler.policies import PARTS

POLICIES = ["elastic", "paper", "fcfs", "fixed:2", "static:2"]
RM = ServiceSpec(name="rm", restore_s=0.5)


def drain(w: Any, node: str = "n0", draining: bool = True) -> None:
    w.handle(events.NodeDrained(name=node, draining=draining))


@pytest.mark.parametrize("policy", POLICIES)
def test_what_only_draining_nodes_could_run_waits_and_begins_when_that_is_undone(world: Any, policy: str) -> None:
    # Given the only node, which is drained
    w = world(policy, services=[RM], quotas=[QuotaSpec(name="search")]).node(cells=1)
    drain(w)
    # When everything comes that needs it
    w.open("e", finish=False)
    w.run("build")
    w.submit("nothing", "build")
    w.call("call", "search")
    w.score("score", "rm")
    w.tick(1.0)
    # Then it waits, and nothing is refused
    assert w.waiting == ["open-e", "build", "nothing", "call", "score"]
    assert not w.grants and not w.ends
    # And begins at once when the drain is undone
    drain(w, draining=False)
    assert w.waiting == []
    assert set(w.grants) == {"open-e", "build", "nothing", "call", "score"}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_stands_and_runs_on_a_draining_node_comes_to_its_end(world: Any, policy: str) -> None:
    # Given an environment and a running action of a node that is drained then
    w = world(policy).node().open("e")
    w.run("runs")
    drain(w)
    # When the trajectory goes on
    w.exec("first", "e", session="s")
    w.submit("read", "cpu.read_file", environment="e")
    w.exec("second", "e", session="s")
    assert {"runs", "first", "read"} <= set(w.grants)
    w.finish("first")
    w.finish("second")
    w.finish("read")
    w.close("e")
    # Then it comes to its end there, and so does what ran
    assert w.grants["close-e"].node == "n0"
    w.finish("close-e")
    w.finish("runs")
    assert {end.status for end in w.ends.values()} == {"succeeded"}
    node = w.core.state.nodes["n0"]
    assert not node.running and not node.environments


def test_who_was_behind_an_action_that_may_not_begin_any_more_starts(world: Any) -> None:
    # Given a node of which one core is free, for which an action of two cores waits before a command
    w = world("fcfs").node(cores=2).open("e")
    w.exec("a", "e")
    w.run("large", 2)
    w.exec("b", "e")
    assert w.waiting == ["large", "b"]
    # When the node is drained, the large one may begin there no longer
    drain(w)
    assert w.waiting == ["large"]
    assert w.grants["b"].node == "n0"


def test_a_node_that_was_kept_for_a_large_environment_is_kept_no_longer(world: Any) -> None:
    # Given a large environment that keeps the first node, on which another one stands
    w = world().node("n0", memory_mb=1000).open("small", memory_mb=500, job="other").node("n1", memory_mb=1000)
    w.open("small1", memory_mb=600, job="other")
    w.open("large", memory_mb=1000, finish=False)
    w.tick(KEPT_AFTER_S + 1.0)
    kept = w.core._environments._order._front["default"].node
    assert kept is not None
    # When that node is drained, and the other one falls empty
    drain(w, kept.spec.name)
    other = {"n0": "n1", "n1": "n0"}[kept.spec.name]
    w.close("small" if other == "n0" else "small1")
    w.finish(f"close-{'small' if other == 'n0' else 'small1'}")
    # Then the large one opens there
    assert w.grants["open-large"].node == other


def test_a_draining_node_that_is_lost_comes_back_draining_and_its_actions_wait_for_others(world: Any) -> None:
    # Given a draining node with an action that may be repeated, and an environment that is being opened
    w = world().node("n0")
    w.run("again", idempotent=True)
    w.open("e", finish=False)
    drain(w)
    # When it is lost and joins again, the worker's process having been restarted
    w.lose()
    w.node("n0")
    w.node("n0")
    # Then they wait, until there is another node
    assert w.waiting == ["again", "open-e"]
    assert w.core.state.nodes["n0"].draining
    w.node("n1")
    assert {w.grants["again"].node, w.grants["open-e"].node} == {"n1"}


def test_what_no_node_could_ever_run_is_refused_though_all_are_draining(world: Any) -> None:
    w = world().node(cores=4)
    drain(w)
    w.run("large", 5)
    assert w.ended("large")[0] == "rejected"


def test_cores_that_were_reserved_on_a_node_are_so_on_another_one_once_that_drains(world: Any) -> None:
    # Given two full nodes, of which one is reserved for a large action that has waited for its turn
    w = world()
    for name in ("n0", "n1"):
        w.node(name, cores=2)
        w.run(f"{name}-a")
        w.run(f"{name}-b")
    w.run("large", 2)
    w.tick(TUNING.turn_after_s + 1.0)
    w.finish("n0-a")
    w.run("other")
    assert w.waiting == ["large", "other"]
    reserved = w.core.state.waiting["large"].reserved_on
    # When that one is drained, and a core of the other one falls free
    assert reserved == "n0"
    drain(w, reserved)
    w.finish("n1-a")
    # Then it is kept until the second one does, too
    assert w.waiting == ["large", "other"]
    w.finish("n1-b")
    assert w.grants["large"].node == "n1"


# GPU cells


@pytest.mark.parametrize("without", [[], *([part] for part in PARTS)])
def test_a_service_that_is_resident_on_a_draining_node_alone_is_brought_to_another_one(world: Any, without: list[str]) -> None:
    # Given a service that is resident on a node that is drained, where one of its actions runs
    w = world(services=[RM], without=without).node("n0", cells=1)
    w.score("a", "rm")
    w.node("n1", cells=1)
    w.score("b", "rm") if "services" in without else None
    drain(w)
    # When another action comes, it does not wait for that instance, idle or not
    w.score("c", "rm")
    w.finish("a")
    w.score("d", "rm")
    started = {start.id: start.grant.node for start in w.of(commands.Start) if start.id in ("c", "d")}
    assert set(started.values()) <= {"n1"}
    for action_id in ("b", "c"):
        if action_id in w.grants:
            w.finish(action_id)
    assert w.grants["d"].node == "n1"


def test_a_line_that_waited_for_a_busy_instance_is_brought_one_elsewhere_as_soon_as_its_node_is_drained(world: Any) -> None:
    # Given an action that waits for a busy instance, since that falls idle sooner than another one could be brought
    w = world(services=[ServiceSpec(name="rm", restore_s=60.0)]).node("n0", cells=1)
    w.score("a", "rm", work_s=1.0)
    w.tick(60.5)
    w.node("n1", cells=1)
    w.score("b", "rm", work_s=1.0)
    assert w.waiting == ["b"]

    drain(w)

    assert (w.grants["b"].node, w.grants["b"].restore) == ("n1", True)


def test_a_node_that_was_reserved_for_a_starving_line_is_so_no_longer(world: Any) -> None:
    # Given two nodes that `rm` keeps busy, while `judge` waits until it has one reserved
    judge = ServiceSpec(name="judge", restore_s=0.5)
    w = world(services=[RM, judge]).node("n0", cells=1).node("n1", cells=1)
    w.score("a0", "rm")
    w.score("a1", "rm")
    w.score("j", "judge")
    w.tick(bound_s(1, 0.0) + 0.1)
    reserved = next(iter(w.core.pools.gpu._dispatcher._ageing._reserved)).node.spec.name
    other = {"n0": "n1", "n1": "n0"}[reserved]
    # When the reserved one is drained, and the action on the other one ends
    drain(w, reserved)
    w.finish(next(i for i in ("a0", "a1") if w.grants[i].node == other))
    # Then it begins there
    assert w.grants["j"].node == other


def test_idle_cells_are_kept_for_a_service_that_is_resident_on_a_draining_node_alone(world: Any) -> None:
    # Given a draining node with a service, and a job that has more than its share of the others
    w = world(services=[ServiceSpec(name="rm"), ServiceSpec(name="judge")]).node("n0", cells=1)
    w.score("first", "judge", job="small", finish=True)
    drain(w)
    w.node("n1", cells=4)
    for number in range(5):
        w.score(f"r{number}", "rm", job="large")
    w.score("j", "judge", job="small")
    assert w.waiting == ["r4", "j"]
    # When an instance falls idle, it makes way for the other job's action
    w.finish("r0")
    assert (w.grants["j"].node, w.evicted("j")) == ("n1", ["rm"])
    assert w.waiting == ["r4"]


def test_the_cells_of_a_draining_node_do_not_count_where_sizes_are_chosen(world: Any) -> None:
    def size(cells_that_drain: int) -> int:
        w = world(services=[ServiceSpec(name="rm", cells=(1, 2), restore_s=0.1)]).node("n0", cells=cells_that_drain)
        drain(w)
        w.node("n1", cells=2)
        for number in range(5):
            w.score(f"a{number}", "rm", (1, 2), parallel=0.5, work_s=2.0)
            if f"a{number}" in w.grants:
                w.finish(f"a{number}")
            w.now += 0.1
        for instance in list(w.core.pools.gpu.groups["n1"].instances):
            w.report("rm", instance.cell_ids, "absent", node="n1")
        w.score("z", "rm", (1, 2), parallel=0.5, work_s=2.0)
        return int(w.grants["z"].units)

    # Many actions are expected: on few cells an instance is small, on many it would be large
    assert size(0) == size(8) == 1


def test_warm_services_are_brought_to_a_node_once_it_drains_no_more(world: Any) -> None:
    # Given a node that joins while it is draining
    w = world(services=[ServiceSpec(name="warm", warm=True)])
    drain(w)
    w.node(cells=1)
    w.tick(1.0)
    assert w.of(commands.Restore) == []

    drain(w, draining=False)
    w.tick(1.0)

    assert [(restore.node, restore.service) for restore in w.of(commands.Restore)] == [("n0", "warm")]


def test_nothing_is_brought_to_a_node_that_has_not_said_what_is_on_its_cells_though_its_drain_is_undone(world: Any) -> None:
    # Given a draining node that a restarted scheduler knows from its journal
    w = world(services=[ServiceSpec(name="warm", warm=True)])
    spec = NodeSpec(name="n0", pools=("gpu",), cores=1, cells=1, services=frozenset({"warm"}))
    drain(w)
    w.handle(events.NodeJoined(node=spec, resumed=True))
    drain(w, draining=False)
    w.tick(1.0)
    assert w.of(commands.Restore) == []
    # When it has said so, they are
    w.handle(events.ServicesDeclared(node="n0", services=frozenset({"warm"})))
    w.tick(1.0)
    assert [restore.service for restore in w.of(commands.Restore)] == ["warm"]


def test_a_node_that_is_drained_and_put_back_while_it_is_away_is_so_when_it_returns(world: Any) -> None:
    w = world().node("n0")
    for draining in (True, False):
        w.lose()
        drain(w, draining=draining)
        w.node("n0")
        assert w.core.state.nodes["n0"].draining is draining
