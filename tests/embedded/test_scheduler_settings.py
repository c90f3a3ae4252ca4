"""From settings to what the scheduler's core is made of, and what is said of settings that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.scheduler_process import setup_of
from tangram.settings import Settings
from tests.cli.forked import forked


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


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"TANGRAM_SHARES": "a:2"}, "TANGRAM_SHARES: Value error, 'a:2' is not like name=2,name=1, with each name once"),
        ({"TANGRAM_SHARES": "a=0"}, "TANGRAM_SHARES: a: Input should be greater than 0"),
        ({"TANGRAM_WITHOUT": "wheels"}, "policy 'elastic' has no part 'wheels' to go without"),
        ({"TANGRAM_EVENT_LOG": "/dev/null/log"}, "/dev/null/log: Not a directory"),
    ],
)
def test_a_scheduler_with_wrong_settings_says_so_in_one_line(tmp_path: Path, variables: dict[str, str], problem: str) -> None:
    database = f"sqlite:///{tmp_path / 'x.sqlite'}"
    done = forked("scheduler", cwd=tmp_path, **{"TANGRAM_DATABASE_URL": database, **variables})
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr and done.stderr.count("\n") == 1
