"""From settings to what the scheduler's core is made of, and what is said of settings that are wrong."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.scheduler_process import setup_of
from tangram.settings import Settings


def test_settings_say_what_the_core_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TANGRAM_POLICY": "elastic",
        "TANGRAM_WITHOUT": "preemption, learning",
        "TANGRAM_SHARES": "job-a=2, b=0.5,",
        "TANGRAM_ORDER_WINDOW_S": "30",
    }.items():
        monkeypatch.setenv(name, value)
    setup = setup_of(Settings())
    assert (setup.policy, setup.without) == ("elastic", ("preemption", "learning"))
    assert (dict(setup.limits.weights), setup.limits.window_s) == ({"job-a": 2.0, "b": 0.5}, 30.0)


@pytest.mark.parametrize("shares", ["a", "a=", "=1", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "a=1,b", "a=1,a=2"])
def test_shares_that_are_none_are_named(shares: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(shares=shares)
    (error,) = caught.value.errors()
    assert error["loc"] in (("shares",), ("shares", "a"))
