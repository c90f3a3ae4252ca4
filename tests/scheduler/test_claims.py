"""How running actions of several jobs grow: what is kept for whom, and who may take from whom."""

from __future__ import annotations

from typing import Any


def build(w: Any, name: str, units: list[int], job: str, parallel: float = 0.99) -> None:
    """Submit an elastic action that is long and scales well."""
    w.run(name, units, parallel=parallel, work_s=1000.0, job=job)


def test_a_job_within_its_share_has_a_claim_on_the_extra_units_of_one_beyond_its(world: Any) -> None:
    # Given a job that has grown over the whole node, with actions to which units are worth more than to anybody
    w = world().node(cores=12)
    for number in range(3):
        build(w, f"wide{number}", [1, 2, 3, 4], "many", parallel=0.999)
    assert [w.units[f"wide{number}"] for number in range(3)] == [4, 4, 4]
    # When one comes of another job that scales badly
    build(w, "build", [1, 2, 4, 8], "few", parallel=0.6)
    assert w.units["build"] == 4
    # but without shares it would have what it is worth
    w = world(without=["shares"]).node(cores=12)
    for number in range(3):
        build(w, f"wide{number}", [1, 2, 3, 4], "many", parallel=0.999)
    build(w, "build", [1, 2, 4, 8], "few", parallel=0.6)
    assert w.units["build"] < 4
