"""What a client leaves that is killed ends at the end of its lease, and never before.

Source: radixark/miles #3215 (defaults that never reclaim what a killed worker left), OpenEnv #991 (30 orphans ran for 25 hours). Trainers
with our own client are in `tests/live/test_live_trainers.py`.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.gateway.conftest import Served

pytestmark = pytest.mark.real

LEASE_S = 15


@pytest.mark.parametrize("shape", ["e2b", "native"])
def test_a_sandbox_of_a_killed_client_ends_with_its_lease_and_not_before(served: Served, shape: str) -> None:
    if shape == "e2b":
        pytest.importorskip("e2b", reason="the extra `clients` is not installed")
    # Given a client whose program runs in its sandbox
    job = f"killed-{shape}"
    words = [sys.executable, "-m", "tests.complaints.abandoning_client", shape, served.url, served.token(job), str(LEASE_S)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            environment = client.stdout.readline().split()[0]
            served.live.until(
                lambda: served.live.rows(f"SELECT id FROM actions WHERE environment = '{environment}' AND status = 'running'")
            )
        finally:
            # When it is killed
            client.send_signal(signal.SIGKILL)
    # Then its sandbox stands until the lease is over, and no longer
    ended = f"SELECT created_at, ended_at FROM environments WHERE id = '{environment}' AND ended_at IS NOT NULL"
    served.live.until(lambda: served.live.rows(ended))
    ((opened_at, ended_at),) = served.live.rows(ended)
    assert ended_at - opened_at >= LEASE_S
    # And nothing of it runs on
    alive = f"SELECT id FROM actions WHERE environment = '{environment}' AND ended_at IS NULL"
    served.live.until(lambda: not served.live.rows(alive))
