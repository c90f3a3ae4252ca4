"""The lease: one holder at a time, and an epoch that tells holders apart."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from app.journal.database import DatabaseError, open_engine
from app.journal.leader import Lease, holder_name

TTL_S = 10.0


def contender(engine: Engine, holder: str) -> Lease:
    return Lease(engine, "scheduler", holder, TTL_S)


def test_of_two_contenders_one_gets_the_lease(engine: Engine) -> None:
    a, b = contender(engine, "a"), contender(engine, "b")
    assert a.acquire(100.0) == 1
    assert b.acquire(105.0) is None
    assert (a.epoch, b.epoch) == (1, None)


def test_the_holder_gets_its_lease_again_under_the_same_epoch(engine: Engine) -> None:
    a = contender(engine, "a")
    assert [a.acquire(100.0), a.acquire(105.0), a.acquire(150.0)] == [1, 1, 1]


def test_a_standby_takes_over_when_the_lease_has_run_out(engine: Engine) -> None:
    # Given a holder that stops renewing
    a, b = contender(engine, "a"), contender(engine, "b")
    a.acquire(100.0)
    assert a.renew(105.0)
    assert b.acquire(114.9) is None
    # When its time is over
    assert b.acquire(115.0) == 2
    # Then the old holder learns it and cannot come back before the lease runs out again
    assert not a.renew(115.1)
    assert a.epoch is None
    assert a.acquire(116.0) is None


def test_a_late_holder_may_renew_as_long_as_nobody_took_over(engine: Engine) -> None:
    a = contender(engine, "a")
    a.acquire(100.0)
    assert a.renew(200.0)
    assert a.epoch == 1


def test_a_released_lease_is_free_at_once(engine: Engine) -> None:
    a, b = contender(engine, "a"), contender(engine, "b")
    a.acquire(100.0)
    a.release()
    assert not a.renew(100.5)
    assert b.acquire(101.0) == 2


def test_release_by_one_that_lost_the_lease_does_not_free_it(engine: Engine) -> None:
    a, b = contender(engine, "a"), contender(engine, "b")
    a.acquire(100.0)
    b.acquire(120.0)
    a.release()
    assert b.renew(121.0)


def test_leases_of_other_names_are_others(engine: Engine) -> None:
    contender(engine, "a").acquire(100.0)
    assert Lease(engine, "janitor", "b", TTL_S).acquire(100.0) == 1


@pytest.mark.parametrize("earlier", ["nobody", "one whose time is over"])
def test_contenders_at_the_same_instant_do_not_both_win(engine: Engine, earlier: str) -> None:
    # Given a lease that was never taken, or has run out
    if earlier != "nobody":
        contender(engine, "gone").acquire(1.0)
    contenders = [contender(engine, f"c{index}") for index in range(8)]
    gate = threading.Barrier(len(contenders))

    def contend(lease: Lease) -> int | None:
        gate.wait(60)
        return lease.acquire(100.0)

    # When eight contend for it at once
    with ThreadPoolExecutor(len(contenders)) as pool:
        epochs = list(pool.map(contend, contenders))
    # Then one gets it
    assert [epoch for epoch in epochs if epoch is not None] == [1 if earlier == "nobody" else 2]


steps = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["acquire", "renew", "release"]), st.floats(0, 15)), max_size=30)


@settings(max_examples=40, deadline=None)
@given(steps)
def test_epochs_tell_holders_apart(shared_engine: Engine, steps: list[tuple[str, str, float]]) -> None:
    # Given three contenders for a fresh lease
    name = f"lease-{holder_name()}"
    contenders = {holder: Lease(shared_engine, name, holder, TTL_S) for holder in "abc"}
    held_by: dict[int, str] = {}
    last: tuple[str | None, int] = (None, 0)
    until, now = 0.0, 100.0
    # When they act in any order
    for holder, step, pause_s in steps:
        now += pause_s
        lease = contenders[holder]
        if step == "release":
            if lease.epoch == last[1]:
                until = 0.0
            lease.release()
            continue
        held = lease.acquire(now) is not None if step == "acquire" else lease.renew(now)
        if held:
            # Then an epoch belongs to one holder, it never falls, and nobody loses the lease before its end
            assert lease.epoch is not None
            assert held_by.setdefault(lease.epoch, holder) == holder
            assert lease.epoch in (last[1], last[1] + 1)
            assert last[0] in (None, holder) or until <= now
            last, until = (holder, lease.epoch), now + TTL_S


def test_a_database_out_of_reach_is_an_error_not_a_lost_lease() -> None:
    lease = contender(open_engine("postgresql+psycopg://nobody@127.0.0.1:1/x"), "a")
    with pytest.raises(DatabaseError, match="onnection refused"):
        lease.acquire(1.0)


def test_a_holder_has_a_name() -> None:
    assert holder_name() != holder_name()
    with pytest.raises(ValueError, match="holder"):
        contender(open_engine("sqlite://"), "")
