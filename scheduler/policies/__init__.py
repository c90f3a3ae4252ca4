"""The policies by name: `elastic`, `paper`, `fcfs`, `fixed:N`, `static:N`."""

from __future__ import annotations

from collections.abc import Collection

from scheduler.policies.abstract import Policy, UnknownPolicy
from scheduler.policies.elastic import PARTS, Elastic
from scheduler.policies.fcfs import Fcfs
from scheduler.policies.fixed import Fixed
from scheduler.policies.paper import Paper
from scheduler.policies.static import Static

NAMES = ("elastic", "paper", "fcfs", "fixed:N", "static:N")


def make_policy(name: str, *, depth: int = 16, without: Collection[str] = ()) -> Policy:
    """Build the policy called `name`; `without` switches parts (`PARTS`) of `elastic` off.

    Raises
    ------
    UnknownPolicy
        When there is none of that name, N is not a whole number above 0, or a part is not one of the policy's.

    """
    unknown = [part for part in without if name != "elastic" or part not in PARTS]
    if unknown:
        raise UnknownPolicy(f"policy {name!r} has no part {unknown[0]!r} to go without; elastic has {', '.join(PARTS)}")
    kind, colon, number = name.partition(":")
    if kind in ("fixed", "static") and colon:
        if not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 100_000:
            raise UnknownPolicy(f"policy {name!r}: N must be a whole number from 1 to 100000")
        return Fixed(int(number)) if kind == "fixed" else Static(int(number))
    if name == "elastic":
        return Elastic(without)
    if name == "paper":
        return Paper(depth)
    if name == "fcfs":
        return Fcfs()
    raise UnknownPolicy(f"policy {name!r} is none of {', '.join(NAMES)}")


__all__ = ["NAMES", "PARTS", "Policy", "UnknownPolicy", "make_policy"]
