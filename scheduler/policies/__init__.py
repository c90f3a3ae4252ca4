"""The policies by name: `elastic`, `paper`, `fcfs`, `fixed:N`, `static:N`."""

from __future__ import annotations

from scheduler.policies.abstract import Policy, UnknownPolicy
from scheduler.policies.elastic import Elastic
from scheduler.policies.fcfs import Fcfs
from scheduler.policies.fixed import Fixed
from scheduler.policies.paper import Paper
from scheduler.policies.static import Static

NAMES = ("elastic", "paper", "fcfs", "fixed:N", "static:N")


def make_policy(name: str, *, depth: int = 16) -> Policy:
    """Build the policy called `name`.

    Raises
    ------
    UnknownPolicy
        When there is none of that name, or N is not a whole number above 0.

    """
    kind, colon, number = name.partition(":")
    if kind in ("fixed", "static") and colon:
        if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 100_000:
            raise UnknownPolicy(f"policy {name!r}: N must be a whole number from 1 to 100000")
        return Fixed(int(number)) if kind == "fixed" else Static(int(number))
    if name == "elastic":
        return Elastic()
    if name == "paper":
        return Paper(depth)
    if name == "fcfs":
        return Fcfs()
    raise UnknownPolicy(f"policy {name!r} is none of {', '.join(NAMES)}")


__all__ = ["NAMES", "Policy", "UnknownPolicy", "make_policy"]
