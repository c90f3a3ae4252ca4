"""Every method of E2B's client, unchanged, with what shows how it goes here."""

from __future__ import annotations

import pytest

pytest.importorskip("e2b", reason="the extra `clients` is not installed")

import e2b

import tests.clients.e2b_git
from tests.clients.e2b_checks import CHECKS, Here
from tests.gateway.conftest import Served, options_of
from tests.gateway.e2b_methods import METHODS

assert tests.clients.e2b_git


@pytest.fixture(scope="module")
def e2b_options(served: Served) -> dict[str, str]:
    """Return the options of a job of these tests alone: they ask what the job has."""
    return options_of(served, "e2b-methods")


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.method)
def test_row(method: object, served: Served, e2b_options: dict[str, str], e2b_sandbox: e2b.Sandbox) -> None:
    CHECKS[method.method](Here(served, e2b_options, e2b_sandbox))  # type: ignore[attr-defined]


def test_every_method_has_its_check() -> None:
    assert set(CHECKS) == {method.method for method in METHODS}
