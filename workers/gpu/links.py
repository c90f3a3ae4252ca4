"""In which order the GPUs of a node are its cells: those that share a fast link are neighbours in aligned chunks of 2, 4 and 8.

Pure. Groups are paired bottom up, devices first, then the pairs, then the fours: of all ways to pair the groups of a size, the one
whose slowest links are fastest in sum, then the one with the most link altogether, then the one nearest to the given order. A
group that finds no partner, since the number is odd, goes last, so that the chunks before it are aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

SYSTEM, NUMA, HOST_BRIDGE, SWITCHES, SWITCH, NVLINK = 0, 1, 2, 3, 4, 100
"""How close two GPUs are: across sockets, on one NUMA node, one host bridge, several PCIe switches, one switch. NVLink adds its links."""

MOST = 16
"""Devices beyond which the given order is kept: no such machine is known, and pairing takes time exponential in their number."""

Group = tuple[int, ...]
Worth = tuple[int, int]


def best_order(links: Sequence[Sequence[int]]) -> list[int]:
    """Return the devices in the order of their cells; `links[a][b]` says how close devices a and b are, the more the closer.

    The matrix is square and symmetric; what stands on its diagonal does not matter.
    """
    groups: list[Group] = [(device,) for device in range(len(links))]
    if len(groups) > MOST:
        return [device for group in groups for device in group]
    last: list[Group] = []
    while len(groups) > 1:
        if len(groups) % 2:
            left_over = _least_missed(groups, links)
            groups.remove(left_over)
            last.insert(0, left_over)
        groups = _paired(groups, links)
    return [device for group in [*groups, *last] for device in group]


def _paired(groups: Sequence[Group], links: Sequence[Sequence[int]]) -> list[Group]:
    """Return an even number of groups as pairs of them."""
    pairs = _pairing(tuple(groups), links)[1]
    return sorted(min((one + other, other + one)) for one, other in pairs)


def _least_missed(groups: Sequence[Group], links: Sequence[Sequence[int]]) -> Group:
    """Return the group without which the others pair best; of equals the last."""
    return max(reversed(groups), key=lambda group: _pairing(tuple(other for other in groups if other != group), links)[0])


def _pairing(groups: tuple[Group, ...], links: Sequence[Sequence[int]]) -> tuple[Worth, tuple[tuple[Group, Group], ...]]:
    """Return the best way to pair an even number of groups, and what it is worth."""

    @cache
    def best(left: int) -> tuple[Worth, tuple[tuple[Group, Group], ...]]:
        if not left:
            return (0, 0), ()
        first = (left & -left).bit_length() - 1
        found: tuple[Worth, tuple[tuple[Group, Group], ...]] | None = None
        for other in range(first + 1, len(groups)):
            if not left & 1 << other:
                continue
            slowest, total = _worth(groups[first], groups[other], links)
            rest, pairs = best(left & ~(1 << first) & ~(1 << other))
            worth = (slowest + rest[0], total + rest[1])
            if found is None or worth > found[0]:
                found = worth, ((groups[first], groups[other]), *pairs)
        if found is None:
            raise ValueError(f"an odd number of groups cannot be paired: {groups}")
        return found

    return best((1 << len(groups)) - 1)


def _worth(one: Group, other: Group, links: Sequence[Sequence[int]]) -> Worth:
    """Return the slowest link between two groups and the sum of all: what is split over both waits for the slowest."""
    between = [links[a][b] for a in one for b in other]
    return min(between), sum(between)
