"""The environments that have not ended, as `tangram envs` reads them, and which of them are orphans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Engine

from app.journal.environments import IDLE_JOB_S, SILENCE_S, EnvironmentStatus, environments
from tests.sql import make

NOW = 10_000.0


def found(engine: Engine, silences: Mapping[str, float | None] | None = None, job: str | None = None) -> dict[str, EnvironmentStatus]:
    """Return what is found at `NOW`, by id, where clients are silent for so long."""

    def silent_s(clients: Sequence[str]) -> Mapping[str, float | None]:
        return {client: (silences or {}).get(client) for client in clients}

    return {one.id: one for one in environments(engine, NOW, silent_s, job=job, lease_s=3600.0)}


def test_environments_are_listed_with_owner_age_lease_and_what_runs_in_them(engine: Engine, write: Any) -> None:
    # Given an environment with a lease of its own, one with the system's that is in use, one that is opening, and one that has ended
    write(
        make.environment("open", NOW - 100, id="own", owner="host:7", client="c", ends_at=NOW + 50, used_at=NOW - 100),
        make.environment("open", NOW - 90, id="used", used_at=NOW - 80),
        make.environment("opening", NOW - 10, id="opening", node=None, job="other"),
        make.environment("closed", NOW - 5, id="ended"),
    )
    write(make.received("a", NOW - 60, environment="used"), make.granted("a", NOW - 59))
    listed = found(engine, {"c": 1.0})
    assert list(listed) == ["own", "used", "opening"]
    own, used, opening = listed.values()
    assert (own.owner, own.client, own.node, own.state, own.age_s, own.lease_left_s) == ("host:7", "c", "n1", "open", 100.0, 50.0)
    assert (used.running, used.lease_left_s, own.running) == (("a",), 3600.0, ())
    assert (opening.state, opening.node, opening.lease_left_s) == ("opening", "", None)
    assert list(found(engine, job="other")) == ["opening"]


def test_an_orphan_is_one_whose_client_is_silent_or_whose_job_has_had_no_action_for_long(engine: Engine, write: Any) -> None:
    # Given environments of clients, and detached ones of a busy job, of one that was active lately and of one that was not
    write(*[make.environment("open", 1.0, id=client, client=client) for client in ("lively", "silent", "forgotten")])
    write(*[make.environment("open", 1.0, id=job, job=job) for job in ("busy", "recent", "idle")])
    for job, ended_at in (("busy", 10.0), ("recent", NOW - IDLE_JOB_S + 1), ("idle", NOW - IDLE_JOB_S - 1)):
        write(make.received(f"{job}-1", 5.0, job=job), make.ended(f"{job}-1", ended_at))
    write(make.received("busy-2", 20.0, job="busy"))
    listed = found(engine, {"lively": SILENCE_S - 1, "silent": SILENCE_S + 1, "forgotten": None})
    assert {id: one.orphan for id, one in listed.items() if one.orphan} == {
        "silent": "its client gave no sign of life for 11 s",
        "forgotten": "its client is not known to the result store",
        "idle": "its job has had no action for 601 s",
    }
