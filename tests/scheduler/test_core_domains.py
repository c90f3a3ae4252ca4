"""Where the cores of a grant lie: together in one domain, and close to what the action holds already.

Small rows of cores are compared with brute force, which looks at every way to choose.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler.cpu.cores import CoreGroup
from scheduler.model import NodeSpec, commands
from scheduler.model.state import Node

ROWS = ((4, 12, 5, 13, 6, 14), (0, 8, 1, 9), (20, 21, 22, 23, 24))
"""Domains as a machine with siblings has them."""

CORES = tuple(core for row in ROWS for core in row)
PLACE = {core: (number, place) for number, row in enumerate(ROWS) for place, core in enumerate(row)}

NODE = Node(NodeSpec(name="n0"), 0, 0.0)

busy_cores = st.sets(st.sampled_from(CORES), max_size=len(CORES))


def group_with(busy: set[int]) -> CoreGroup:
    """Return the cores of these rows, of which some are taken."""
    group = CoreGroup(NODE, ROWS, {})
    assert set(group.claim(sorted(busy))) == busy
    return group


def in_rows(cores: Any) -> list[list[int]]:
    """Return the places of cores in ascending order, for each row."""
    return [sorted(PLACE[core][1] for core in cores if PLACE[core][0] == number) for number in range(len(ROWS))]


def stretches(places: list[int]) -> list[int]:
    """Return the lengths of the stretches that places make."""
    lengths: list[int] = []
    for at, place in enumerate(places):
        if at and places[at - 1] == place - 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def rows_used(cores: Any) -> list[int]:
    return [number for number, places in enumerate(in_rows(cores)) if places]


@given(busy=busy_cores, count=st.integers(1, len(CORES)))
def test_what_is_taken_comes_from_the_domain_and_there_from_the_stretch_that_fits_best(busy: set[int], count: int) -> None:
    group, free = group_with(busy), in_rows(set(CORES) - busy)
    assume(count <= group.free)
    taken = group.take(count)
    # Then they were free, each once, and are so no longer
    assert len(set(taken)) == len(taken) == count
    assert sorted({*taken, *group.free_ids}) == sorted(set(CORES) - busy)
    enough, used = [len(places) for places in free if len(places) >= count], rows_used(taken)
    if not enough:  # they are of as few domains as can be
        fewest = next(n for n in range(1, 4) if any(sum(map(len, some)) >= count for some in combinations(free, n)))
        assert len(used) == fewest
        return
    # And they are of the domain in which fewest are left over
    (number,) = used
    assert len(free[number]) == min(enough)
    # And there they lie in one stretch where there is one, in the shortest that is long enough
    before, places = stretches(free[number]), in_rows(taken)[number]
    long_enough = [length for length in before if length >= count]
    if long_enough:
        assert stretches(places) == [count]
        left = sorted(before)
        left.remove(min(long_enough))
        left += [min(long_enough) - count] * (min(long_enough) > count)
        assert sorted(stretches(in_rows(group.free_ids)[number])) == sorted(left)
    else:  # and else in as few as can be
        fewest = next(n for n in range(1, len(before) + 1) if sum(sorted(before)[-n:]) >= count)
        assert len({stretch_of(free[number], place) for place in places}) == fewest


def stretch_of(places: list[int], place: int) -> int:
    """Return the first place of the stretch in which a place lies."""
    while place - 1 in places:
        place -= 1
    return place


@given(busy=busy_cores, data=st.data())
def test_what_grows_stays_in_its_domain_and_next_to_itself(busy: set[int], data: st.DataObject) -> None:
    # Given an action that holds cores of one domain, and others that are taken
    number = data.draw(st.sampled_from(range(len(ROWS))))
    held = data.draw(st.sets(st.sampled_from(ROWS[number]), min_size=1))
    group, free = group_with(busy | held), in_rows(set(CORES) - busy - held)
    count = data.draw(st.integers(1, len(CORES)))
    assume(count <= group.free)
    taken = group.take(count, near=tuple(held))
    # Then as many as can be are of its own domain, and none is granted twice
    assert len(set(taken)) == count and not set(taken) & (busy | held)
    at_home = in_rows(taken)[number]
    assert len(at_home) == min(count, len(free[number]))
    # And as many of these as can be are next to what it holds, or to each other up to it
    mine, places = in_rows(held)[number], free[number]
    touching = {place for place in places if any(reaches(places, place, own) for own in mine)}
    assert len(touching & set(at_home)) == min(len(at_home), len(touching))
    # And in one stretch with it where one has enough
    ends = [sum(stretch_of(places, p) == start for p in places) for start in {stretch_of(places, p) for p in touching}]
    if any(length >= count for length in ends):
        assert len(stretches(sorted([*mine, *at_home]))) <= len(stretches(mine))


def reaches(free: list[int], place: int, own: int) -> bool:
    """Say whether all places between two are free."""
    return all(between in free for between in range(min(place, own) + 1, max(place, own)))


@given(held=st.sets(st.sampled_from(CORES), min_size=1, max_size=9).map(tuple), data=st.data())
def test_what_shrinks_keeps_what_lies_closest_together(held: tuple[int, ...], data: st.DataObject) -> None:
    # Given an action on any cores; when it gives some of them back
    count = data.draw(st.integers(1, len(held)))
    group = group_with(set(held))
    kept = group.shrink(held, count)
    # Then it keeps some of its own, and the others are free
    assert group.free == len(CORES) - count and not set(kept) & set(group.free_ids)
    assert set(kept) <= set(held) and len(set(kept)) == len(kept) == count
    # And no other choice lies in fewer domains, nor closer together in one
    fewest = min(len(rows_used(choice)) for choice in combinations(held, count))
    assert len(rows_used(kept)) == fewest
    if fewest == 1:
        alone = [choice for choice in combinations(held, count) if len(rows_used(choice)) == 1]
        assert width(kept) == min(width(choice) for choice in alone)


def width(cores: tuple[int, ...]) -> int:
    places = [PLACE[core][1] for core in cores]
    return max(places) - min(places)


def test_an_elastic_action_stays_in_its_domain_while_it_grows_and_shrinks(world: Any) -> None:
    w = world("elastic").node(cores=8, domains=((0, 4, 1, 5), (2, 6, 3, 7)))
    for name in ("a", "b"):
        w.run(name, (2, 4), parallel=0.99, work_s=1000.0)
    assert [set(w.grants[name].core_ids) for name in ("a", "b")] == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    # When a third one takes two cores of one of them
    w.run("c", 2)
    # Then siblings stay with the one and go to the other
    (shrunk,) = w.of(commands.Resize)
    pairs = [set(shrunk.core_ids), set(w.grants["c"].core_ids)]
    assert pairs in ([{0, 4}, {1, 5}], [{2, 6}, {3, 7}])
    # And when the third has ended, it has its domain again
    w.finish("c")
    assert [set(w.grants[name].core_ids) for name in ("a", "b")] == [{0, 4, 1, 5}, {2, 6, 3, 7}]
