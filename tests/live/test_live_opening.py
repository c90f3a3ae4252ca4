"""An open that is cancelled or out of time, by a trainer's own words."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from tangram import Action, ActionCancelled, ActionTimedOut, Client
from tangram.handles import Handle
from tests.live.support import Live

FILES = json.dumps({f"files/{number}": "" for number in range(200_000)})
"""More files than a worker writes in the time of a test."""


def opening(client: Client, **fields: float | str) -> tuple[str, Handle[None]]:
    """Have an environment opened that takes long; return its id, too."""
    environment = f"env-{secrets.token_hex(4)}"
    arguments = {"environment": environment, "files": FILES}
    return environment, client.submit(Action(kind="cpu.open", arguments=arguments, environment=environment, **fields))  # type: ignore[arg-type]


def folders(live: Live, environment: str) -> list[Path]:
    """Return the folders of an environment on any node."""
    return list(live.stack.state_dir.glob(f"environments/*/environments/{environment}"))


def is_closed(live: Live, environment: str) -> bool:
    """Say whether the scheduler has an environment for closed."""
    return [tuple(row) for row in live.rows(f"SELECT state FROM environments WHERE id = '{environment}'")] == [("closed",)]


def test_a_cancel_ends_an_open_and_nothing_is_left(client: Client, live: Live) -> None:
    # Given an environment that is being opened
    environment, handle = opening(client, trajectory="t")
    live.until(lambda: folders(live, environment))
    # When its open is cancelled; then it ends as that, and the environment has gone
    handle.cancel()
    with pytest.raises(ActionCancelled):
        handle.result(timeout_s=60)
    live.until(lambda: not folders(live, environment))
    live.until(lambda: is_closed(live, environment))


def test_cancelling_a_trajectory_ends_its_opens(client: Client, live: Live) -> None:
    # Given an environment of a trajectory that is being opened
    environment, handle = opening(client, trajectory="given-up")
    live.until(lambda: folders(live, environment))
    # When the trajectory is cancelled; then the open ends as that, and the environment has gone
    client.cancel(trajectory="given-up")
    with pytest.raises(ActionCancelled):
        handle.result(timeout_s=60)
    live.until(lambda: not folders(live, environment))


def test_an_open_out_of_time_ends_and_nothing_is_left(client: Client, live: Live) -> None:
    # Given an environment that takes longer to open than it may
    environment, handle = opening(client, timeout_s=3.0)
    # When the time is over; then the open has ended as that, and the environment has gone
    with pytest.raises(ActionTimedOut, match=r"^the environment was not open after 3 s: it was writing the files"):
        handle.result(timeout_s=60)
    live.until(lambda: not folders(live, environment))
    live.until(lambda: is_closed(live, environment))
