"""A stack with a gateway that the tests of clients share, and this process pointed at it."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import Served, served

__all__ = ["Served", "served"]


@pytest.fixture
def e2b_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the variables by which programs that use E2B's client find the gateway; return the job of their token."""
    job = "by-e2b"
    for name, text in (("E2B_API_KEY", served.token(job)), ("E2B_API_URL", served.url), ("E2B_SANDBOX_URL", served.url)):
        monkeypatch.setenv(name, text)
    return job


def left_open(served: Served, job: str) -> int:
    """Return how many environments of a job stand."""
    return int(served.live.rows(f"select count(*) from environments where job = '{job}' and state = 'open'")[0][0])
