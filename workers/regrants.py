"""Changes of the grants of running calls: what a change is, which of two is older, and how one is carried out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from app.action_task import Call
from tangram.wire import WireGrant
from workers.cpu.abstract import Holding

log = logging.getLogger(__name__)

STALE = "a change of try %d of action %s is out of date: %s, the last was %s"

Stamp = tuple[int, int]
"""The age of a change: the scheduler's epoch, and the serial of its message."""


@dataclass(slots=True)
class Early:
    """Changes of a grant that has not come yet: the newest `stamp`, and what they make of the grant."""

    stamp: Stamp
    change: dict[str, Any] = field(default_factory=dict)


def holding_of(grant: WireGrant) -> Holding:
    """Return what a command with this grant may use."""
    return Holding(tuple(grant["core_ids"]), grant["background"])


def granted(core_ids: tuple[int, ...], *, background: bool) -> dict[str, Any]:
    """Return the parts of a grant that change with its cores; in the background the program keeps its DoP. Raises `InvalidAction`."""
    Holding(core_ids, background)
    units = {} if background else {"units": len(core_ids)}
    return {"core_ids": list(core_ids), "background": background, **units}


def resize(call: Call, on_resize: Callable[[Holding], None]) -> None:
    """Have a call's grant carried out. What fails twice, such as a request to a container engine, is an error in the log."""
    holding = holding_of(call.grant)
    try:
        on_resize(holding)
    except Exception as first:
        log.warning("a change of the grant of action %s is tried once more: %s", call.id, first)
        try:
            on_resize(holding)
        except Exception as error:
            log.error("the grant of action %s could not be changed to %s: %s", call.id, holding, error)
