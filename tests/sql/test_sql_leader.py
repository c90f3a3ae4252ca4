"""The lease: one holder at a time, and an epoch that tells holders apart."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from app.journal.database import DatabaseError, open_engine
from app.journal.leader import Lease, holder_name
from tangram import clock

TTL_S = 10.0


def contender(engine: Engine, holder: str) -> Lease:
    return Lease(engine, "scheduler", holder, TTL_S)


def acquired_at_once(leases: Sequence[Lease]) -> list[int | None]:
    """Have all these acquire at the same instant; return their epochs."""
    gate = threading.Barrier(len(leases))

    def acquire(lease: Lease) -> int | None:
        gate.wait(60)
        return lease.acquire(100.0)

    with ThreadPoolExecutor(len(leases)) as pool:
        return list(pool.map(acquire, leases))


@pytest.mark.parametrize("earlier", ["nobody", "one whose time is over"])
def test_contenders_at_the_same_instant_do_not_both_win(engine: Engine, earlier: str) -> None:
    if earlier != "nobody":
        contender(engine, "gone").acquire(1.0)
    epochs = acquired_at_once([contender(engine, f"c{index}") for index in range(8)])
    assert [epoch for epoch in epochs if epoch is not None] == [1 if earlier == "nobody" else 2]


def test_those_that_hold_a_lease_together_all_have_it_at_the_same_instant(engine: Engine) -> None:
    assert acquired_at_once([contender(engine, "together") for _ in range(8)]) == [1] * 8


steps = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["acquire", "renew", "release"]), st.floats(0, 15)), max_size=30)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_one_holds_the_lease_until_its_time_is_over_or_it_gives_it_up(shared_engine: Engine, steps: list[tuple[str, str, float]]) -> None:
    name = f"lease-{holder_name()}"
    contenders = {holder: Lease(shared_engine, name, holder, TTL_S) for holder in "abc"}
    held_by, epoch, until, now = "", 0, 0.0, 100.0
    for holder, step, pause_s in steps:
        now += pause_s
        lease, holds = contenders[holder], held_by == holder
        if step == "release":
            lease.release()
            held_by, until = ("", 0.0) if holds else (held_by, until)
        elif step == "renew":
            # Then who holds it may renew it, however late, and who does not learns it
            assert lease.renew(now) == holds
            assert lease.epoch == (epoch if holds else None)
            until = now + TTL_S if holds else until
        else:
            # And who acquires it has it under its own epoch, or a new one where the time of the last holder is over
            free = holds or now >= until
            epoch += free and not holds
            assert lease.acquire(now) == lease.epoch == (epoch if free else None)
            held_by, until = (holder, now + TTL_S) if free else (held_by, until)


def test_who_is_patient_and_could_not_look_leaves_its_holder_the_time_to_prolong_the_lease(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks_at(second: float) -> int | None:
        monkeypatch.setattr(clock, "monotonic", lambda: second)
        return patient.acquire(second)

    # Given one that stands by, and a database that was away until the lease had run out
    contender(engine, "leader").acquire(0.0)
    patient = Lease(engine, "scheduler", "patient", TTL_S, patient=True)
    assert [looks_at(second) for second in (1.0, 3.0, 12.0, 14.0, 15.9)] == [None] * 5
    # When its holder is gone as well
    assert looks_at(16.0) == 2


@pytest.mark.parametrize("behind_s", [None, 100.0])
def test_who_is_patient_takes_what_has_stood_though_the_database_is_slow(
    engine: Engine, behind_s: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a database so slow that each look comes later than the lease is surely held
    leader, patient = contender(engine, "leader"), Lease(engine, "scheduler", "patient", TTL_S, patient=True)
    leader.acquire(0.0)
    epochs = []
    for second in (1.0, 6.0, 11.0, 16.0):
        monkeypatch.setattr(clock, "monotonic", lambda: second)  # noqa: B023
        if behind_s is not None:
            leader.renew(second - behind_s)
        epochs.append(patient.acquire(second))
    # Then a lease whose holder is gone is taken, and one that is prolonged is not, though its holder's clock is behind
    assert epochs == ([None, None, 2, 2] if behind_s is None else [None] * 4)
    said = ["lease 'scheduler' could not be looked at for 5.0 s: its holder has time to prolong it"]
    assert [record.getMessage() for record in caplog.records] == (said if behind_s is None else [])


def test_a_database_out_of_reach_is_an_error_not_a_lost_lease() -> None:
    lease = contender(open_engine("postgresql+psycopg://nobody@127.0.0.1:1/x"), "a")
    with pytest.raises(DatabaseError, match="onnection refused"):
        lease.acquire(1.0)


def test_a_holder_has_a_name() -> None:
    assert holder_name() != holder_name()
    with pytest.raises(ValueError, match="holder"):
        contender(open_engine("sqlite://"), "")


@pytest.mark.parametrize(("ttl_s", "most_ms"), [(0.001, 1), (5.0, 2000), (1e7, 2**31 - 1), (math.inf, 2**31 - 1)])
def test_each_length_of_a_lease_limits_transactions_that_stand_still(postgres_engine: Engine, ttl_s: float, most_ms: int) -> None:
    asked = text("SELECT setting FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'")
    # Without transactions, or the shortest limit would end the one of the question.
    with postgres_engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        Lease(postgres_engine, "scheduler", "a", ttl_s).bind(connection)
        assert connection.execute(asked).scalar_one() == str(most_ms)
        connection.invalidate()
