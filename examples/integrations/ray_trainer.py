"""A trainer on Ray: rollouts in several actors, the policy in the driver.

    python -m examples.integrations.ray_trainer

Run it from the project's root beside a stack (`tangram up`), with `ray` installed. Each actor has one client, and many rollouts in its
event loop. Ray gives an actor no core: the commands run on the stack's nodes, and the stack decides when.

An actor that dies takes its client with it: after `TANGRAM_ORPHAN_S` its environments are closed. Its rollouts have no reward then.
"""

from __future__ import annotations

import os
from pathlib import Path

import ray

from examples.integrations.asyncio_trainer import Policy, reward_of
from tangram import AsyncClient

ROOT = Path(__file__).resolve().parents[2]
JOB = "ray-trainer"


@ray.remote(num_cpus=0, max_concurrency=64)
class Rollouts:
    """An actor that carries out rollouts."""

    def __init__(self) -> None:
        self._client = AsyncClient(job=JOB)

    async def reward(self, trajectory: str, choice: int) -> float | None:
        """Return the reward of a rollout, None where the stack has failed in it."""
        return await reward_of(self._client, trajectory, choice)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()


def train(steps: int = 5, group: int = 8, actors: int = 2) -> Policy:
    """Train for some steps and return the policy."""
    variables = {name: text for name, text in os.environ.items() if name.startswith("TANGRAM_")} | {"PYTHONPATH": str(ROOT)}
    ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": variables})
    try:
        policy, workers = Policy(), [Rollouts.remote() for _ in range(actors)]
        for step in range(steps):
            choices = [policy.choose() for _ in range(group)]
            asked = [workers[number % actors].reward.remote(f"step-{step}-{number}", choice) for number, choice in enumerate(choices)]
            rewards = [_reward(each) for each in asked]
            policy.learn(choices, rewards)
            print(f"step {step}: rewards {rewards}, the repair has a probability of {policy.probabilities()[1]:.2f}")
        ray.get([worker.close.remote() for worker in workers])
        return policy
    finally:
        ray.shutdown()


def _reward(asked: ray.ObjectRef) -> float | None:
    """Return a reward; an actor that died has none."""
    try:
        reward: float | None = ray.get(asked)
        return reward
    except ray.exceptions.RayActorError as error:
        print(f"an actor died: {error}")
        return None


if __name__ == "__main__":
    train()
