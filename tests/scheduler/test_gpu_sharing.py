"""Several services on one GPU: as many as its memory holds, one of which computes at a time."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.gpu.cells import CellGroup, Instance
from scheduler.gpu.tuning import TUNING
from scheduler.model import UNLIMITED, Evicted, Grant, NodeSpec, ServiceSpec
from scheduler.model.state import Node
from scheduler.sim.cell_books import BrokenGrant, CellBooks

RM = ServiceSpec(name="rm", memory_mb=30, restore_s=0.5)
JUDGE = ServiceSpec(name="judge", memory_mb=40, restore_s=0.5)
LARGE = ServiceSpec(name="large", memory_mb=60, restore_s=0.5)
SILENT = ServiceSpec(name="silent", restore_s=0.5)
MANY = ServiceSpec(name="many", memory_mb=30, restore_s=0.5, max_concurrency=2)


def test_two_services_stay_on_one_cell_and_take_turns(world: Any) -> None:
    # Given a cell with memory for both, on which each has run
    w = world(services=[RM, JUDGE]).node(cells=1, cell_memory_mb=80)
    for name, service in (("a", "rm"), ("b", "judge")):
        w.score(name, service, finish=True)
    w.score("c", "rm")
    assert w.grants["c"].restore is False
    # When the one computes, then the other waits for the cell, and needs no restore afterwards
    w.score("d", "judge")
    assert w.waiting == ["d"]
    w.finish("c")
    assert (w.grants["d"].restore, w.evicted("d")) == (False, [])


@pytest.mark.parametrize(
    ("policy", "without", "spec", "cell_memory_mb"),
    [
        ("elastic", ["sharing"], RM, 80),
        *((policy, [], RM, 80) for policy in ("paper", "fcfs", "fixed:1")),
        ("elastic", [], SILENT, 80),
        ("elastic", [], RM, UNLIMITED),
    ],
    ids=["without the part", "paper", "fcfs", "fixed", "a service that says nothing of its memory", "a cell of unknown memory"],
)
def test_each_has_the_cell_for_itself(world: Any, policy: str, without: list[str], spec: ServiceSpec, cell_memory_mb: int) -> None:
    w = world(policy, services=[spec, JUDGE], without=without).node(cells=1, cell_memory_mb=cell_memory_mb)
    w.score("a", spec.name, finish=True)
    w.score("b", "judge")
    w.tick(3.0)
    assert w.evicted("b") == [spec.name]


def test_an_instance_that_always_computes_lets_another_one_have_its_turn(world: Any) -> None:
    # Given a cell on which a service with two places is never idle, and another one that is resident there
    w = world(services=[MANY, JUDGE]).node(cells=1, cell_memory_mb=80)
    w.score("j0", "judge", finish=True)
    w.score("m0", "many")
    w.score("m1", "many")
    w.score("j1", "judge")
    for number in range(2, 40):
        w.score(f"m{number}", "many")
        w.tick(1.0)
        w.finish(f"m{number - 2}")
        if "j1" in w.grants:
            break
        w.finish(f"m{number - 1}") if w.now > TUNING.aged_s else None
    assert "j1" in w.grants
    assert (w.grants["j1"].restore, w.evicted("j1")) == (False, [])
    assert w.now <= TUNING.aged_s + TUNING.turn_s + 2.0


MEMORY_MB = 4
BLOCKS = [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 1, 2, 3)]
PLACED = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3), st.sampled_from(BLOCKS), st.booleans()), max_size=8)


@settings(max_examples=150)
@given(PLACED, st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_cells_are_found_whenever_there_are_any_and_each_victim_is_needed(
    placed: list[tuple[str, int, tuple[int, ...], bool]], need_mb: int, count: int
) -> None:
    # Given instances on four cells, as far as they fit
    group = CellGroup(Node(NodeSpec(name="n", cells=4, cell_memory_mb=MEMORY_MB), 0, 0.0), {}, sharing=True)
    for service, memory_mb, cell_ids, busy in placed:
        spec = ServiceSpec(name=service, memory_mb=memory_mb)
        if group.has_room_on(spec, cell_ids) and not (busy and any(i.busy for cell in cell_ids for i in group.on(cell))):
            group.adopt(spec, cell_ids).active.update({service: None} if busy else {})
    idle = [instance for instance in group.instances if not instance.busy]
    # When cells are looked for, for one more
    plan = group.plan(ServiceSpec(name="new", memory_mb=need_mb), count, idle)

    # Then they are found where any choice of evictions would do, and without any one of them they would not do
    def would_do(cell: int, gone: list[Instance]) -> bool:
        left = [one for one in group.on(cell) if one not in gone]
        return not any(one.busy for one in left) and sum(one.memory_mb for one in left) + need_mb <= MEMORY_MB

    ways = [gone for size in range(len(idle) + 1) for gone in combinations(idle, size)]
    possible = any(sum(would_do(cell, list(gone)) for cell in range(4)) >= count for gone in ways)
    assert (plan is not None) == possible
    if plan is not None:
        assert len(set(plan.cell_ids)) == count
        assert all(would_do(cell, plan.evicted) for cell in plan.cell_ids)
        for kept in plan.evicted:
            gone = [instance for instance in plan.evicted if instance is not kept]
            assert not all(would_do(cell, gone) for cell in plan.cell_ids)


@pytest.mark.parametrize(
    ("first_ended", "first", "service", "evicted", "cell", "restore", "why"),
    [
        (False, "rm", "judge", (), 0, True, "computes on cells"),
        (False, "rm", "judge", ("rm",), 0, True, "while it runs something"),
        (False, "rm", "judge", (), 1, False, "not resident"),
        (False, "rm", "rm", (), 0, True, "where it is resident"),
        (False, "rm", "rm", (), 0, False, "more at once"),
        (True, "rm", "large", (), 0, True, "no memory for it"),
        (True, "stays", "large", ("stays",), 0, True, "pinned"),
        (True, "rm", "large", ("judge",), 0, True, "not resident"),
    ],
)
def test_the_books_find_what_cells_would_not_allow(
    first_ended: bool, first: str, service: str, evicted: tuple[str, ...], cell: int, restore: bool, why: str
) -> None:
    books = CellBooks({spec.name: spec for spec in (RM, JUDGE, LARGE, ServiceSpec(name="stays", memory_mb=10, pinned=True))})
    books.join(NodeSpec(name="n", cells=2, cell_memory_mb=80))
    books.start("a", first, Grant(node="n", cell_ids=(0,), restore=True))
    if first_ended:
        books.finish("a")
    evict = tuple(Evicted(service=name, cell_ids=(0,)) for name in evicted)
    with pytest.raises(BrokenGrant, match=why):
        books.start("b", service, Grant(node="n", cell_ids=(cell,), restore=restore, evict=evict))
