"""The example trainers, on a stack."""

from __future__ import annotations

import random

import pytest

from examples.integrations import asyncio_trainer
from examples.integrations.asyncio_trainer import Policy, reward_of
from tangram import AsyncClient, EnvironmentLost
from tests.integrations.conftest import standing
from tests.live.support import Live

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("live")]


async def test_a_policy_learns_the_repair_and_no_environment_is_left(live: Live) -> None:
    random.seed(1)
    before = standing(live)
    policy = await asyncio_trainer.train(steps=3, group=4)
    assert policy.probabilities()[1] > 0.5
    # The journal learns of a close after its caller; what was there before may end meanwhile
    live.until(lambda: set(standing(live)) <= set(before))


async def test_a_rollout_that_the_stack_failed_has_no_reward_and_its_group_does_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> float:
        raise EnvironmentLost("its node died", "cpu-0")

    monkeypatch.setattr(asyncio_trainer, "rollout", lost)
    async with AsyncClient("trainer") as client:
        assert await reward_of(client, "t", 1) is None
    with_it, without = Policy(), Policy()
    with_it.learn([1, 0, 2], [1.0, 0.0, None])
    without.learn([1, 0], [1.0, 0.0])
    assert with_it == without


def test_the_trainer_on_ray_learns_it_too(live: Live) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from examples.integrations import ray_trainer

    random.seed(1)
    assert ray_trainer.train(steps=3, group=6).probabilities()[1] > 0.5
