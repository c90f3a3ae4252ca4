"""Every method of E2B's client, unchanged, with what shows how it goes here."""

from __future__ import annotations

import pytest

pytest.importorskip("e2b", reason="the extra `clients` is not installed")

import e2b

from tests.clients.e2b_checks import Here
from tests.clients.e2b_git import CHECKS
from tests.gateway.conftest import Served, options_of
from tests.gateway.e2b_methods import OTHERWISE


@pytest.fixture(scope="module")
def e2b_options(served: Served) -> dict[str, str]:
    """Return the options of a job of these tests alone: they ask what the job has."""
    return options_of(served, "e2b-methods")


@pytest.fixture(scope="module")
def shown() -> set[object]:
    """The checks that have passed: one that stands for several methods runs once."""
    return set()


@pytest.mark.parametrize("method", CHECKS)
def test_row(method: str, served: Served, e2b_options: dict[str, str], e2b_sandbox: e2b.Sandbox, shown: set[object]) -> None:
    if CHECKS[method] not in shown:
        CHECKS[method](Here(served, e2b_options, e2b_sandbox))
        shown.add(CHECKS[method])


def test_the_checks_have_every_method_of_the_client() -> None:
    sandbox = e2b.Sandbox
    parts = [getattr(sandbox, name).fget.__annotations__["return"] for name in ("commands", "files", "pty", "git")]
    owners = (sandbox, *parts, e2b.CommandHandle, e2b.Template)
    public = {f"{owner.__name__}.{name}" for owner in owners for name in dir(owner) if name[0] != "_" and callable(getattr(owner, name))}
    assert public == set(CHECKS) >= set(OTHERWISE)
    assert all(how.startswith(("differs: ", "refused: ")) for how in OTHERWISE.values())
