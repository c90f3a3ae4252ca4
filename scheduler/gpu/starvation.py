"""Who is owed cells: a job within its share whose service is nowhere, while jobs beyond theirs keep all instances busy.

Waiting actions of a job beyond its share come last in the queue, but one that finds its service resident would start at once
all the same, and no instance would ever fall idle for the others. So while somebody is owed, such actions start only on
instances that run others already, or are pinned. An action whose service is nowhere is owed cells once it has waited for as long as a
restore takes; from `OVERDUE_S` on, when it has a node to itself (ageing.py), no longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.gpu.ageing import OVERDUE_S
from scheduler.gpu.lines import Line, Place
from scheduler.state import Node


def owed(lines: Iterable[Line], nodes: Iterable[Node], now: float) -> bool:
    """Say whether one of the lines is owed cells; they are those of the actions that come before jobs beyond their share.

    It is, if no node has an instance that it could use, idle, busy or leaving, though one of those that are looked at could have.
    """
    there = {(one.service, one.size) for node in nodes for one in node.cells.instances}  # only asked for membership
    for line in lines:
        if not line.waiting or not line.spec.restore_s <= now - line.since < OVERDUE_S:
            continue
        nowhere = all((line.service, size) not in there for size in line.units)
        if nowhere and any(node.cells.could_serve(line.spec, line.units) for node in line.nodes):
            return True
    return False


def keep_idle(places: Iterable[list[Place]]) -> None:
    """Take the idle instances out of the places, but for pinned ones, which could not make way."""
    for free in places:
        free[:] = [(instance, node) for instance, node in free if instance.active or instance.pinned]
