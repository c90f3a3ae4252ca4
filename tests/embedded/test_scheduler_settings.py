"""From settings to what the scheduler's core is made of, and what is said of settings that are wrong."""

from __future__ import annotations

from pathlib import Path

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


def test_each_shard_has_its_part_of_the_starts_and_the_first_one_the_quotas(tmp_path: Path) -> None:
    (tmp_path / "services.toml").write_text("[quotas.search]\nconcurrency = 2\n")
    settings = Settings(shards=3, starting_limit=64, starts_per_s=60.0, services_file=tmp_path / "services.toml")
    for shard, quotas in enumerate((["search"], [], [])):
        setup = setup_of(settings.model_copy(update={"shard": shard}))
        assert (setup.limits.starting_limit, setup.limits.starts_per_s) == (21, 20.0)
        assert [quota.name for quota in setup.quotas] == quotas


@pytest.mark.parametrize("shares", ["a", "a=", "=1", "a=x", "a=0", "a=-1", "a=nan", "a=inf", "a=1,b", "a=1,a=2"])
def test_shares_that_are_none_are_named(shares: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(shares=shares)
    (error,) = caught.value.errors()
    assert error["loc"] in (("shares",), ("shares", "a"))


@pytest.mark.parametrize("name", ["timeout_s", "open_timeout_s", "connect_timeout_s", "beat_s", "image_pull_s", "container_start_s"])
def test_a_wait_that_no_lock_or_socket_takes_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("inf", "1e10"):
        monkeypatch.setenv(f"TANGRAM_{name.upper()}", seconds)
        with pytest.raises(ValidationError, match="less than or equal to 1000000000"):
            Settings()
