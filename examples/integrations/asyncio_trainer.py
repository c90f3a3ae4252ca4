"""A trainer in one process: rollouts of a group side by side, a score for each, and a policy that learns from them.

    python -m examples.integrations.asyncio_trainer

Run it from the project's root beside a stack (`tangram up`). The "model" is a table of probabilities over four edits of the bundled
repository, one of which repairs it; it is trained with the group-relative advantages of GRPO. A rollout goes as that of a real trainer:

* an environment for each rollout, closed at its end, whatever happened in it;
* the tests are scored with `fence=True`, after everything that the rollout left running was ended;
* a rollout in which the stack failed is done again, in another environment. Where that fails too it has no reward, and its group does
  without it. It never counts as 0.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from tangram import ActionLost, AsyncClient, StackUnreachable

REPO = Path(__file__).resolve().parents[1] / "repo"
FILES = [path for path in sorted(REPO.rglob("*.py")) if "tests" in path.parts or path.parent in (REPO, REPO / "textkit", REPO / "tools")]
BROKEN = "if len(candidate) >= longest"
EDITS = ("if len(candidate) == longest", "if len(candidate) > longest", "if len(kept) >= longest", "if not candidate")
ATTEMPTS = 3


@dataclass
class Policy:
    """Probabilities of the edits, as logits."""

    logits: list[float] = field(default_factory=lambda: [0.0] * len(EDITS))

    def probabilities(self) -> list[float]:
        """Return them, adding up to 1."""
        weights = [math.exp(logit) for logit in self.logits]
        return [weight / sum(weights) for weight in weights]

    def choose(self) -> int:
        """Return the number of an edit."""
        return random.choices(range(len(EDITS)), self.probabilities())[0]

    def learn(self, choices: list[int], rewards: list[float | None], rate: float = 1.5) -> None:
        """Follow the gradient of a group, leaving out what has no reward."""
        scored = [(choice, reward) for choice, reward in zip(choices, rewards, strict=True) if reward is not None]
        if not scored:
            return
        mean, spread = statistics.fmean(reward for _, reward in scored), statistics.pstdev(reward for _, reward in scored)
        before = self.probabilities()
        for choice, reward in scored:
            advantage = (reward - mean) / (spread + 1e-6)
            for edit in range(len(EDITS)):
                self.logits[edit] += rate / len(scored) * advantage * ((edit == choice) - before[edit])


async def rollout(client: AsyncClient, trajectory: str, choice: int) -> float:
    """Edit the repository and return the reward: 1 where all tests pass, else 0. Raises where the stack failed, which is no reward."""
    async with await client.open(trajectory=trajectory) as env:
        await asyncio.gather(*(env.write_file(str(path.relative_to(REPO)), path.read_bytes()) for path in FILES))
        edit = "python3 tools/edit.py textkit/slug.py"
        broken = await env.exec(f"{edit} 'if len(candidate) > longest' '{BROKEN}'")
        assert broken.exit_code == 0, broken
        await env.exec(f"{edit} '{BROKEN}' '{EDITS[choice]}'")
        done = await env.exec('python3 runtests.py --jobs "$TANGRAM_DOP_MAX" test_slug', units=[1, 2], timeout_s=60, fence=True)
        return float(done.exit_code == 0)


async def reward_of(client: AsyncClient, trajectory: str, choice: int) -> float | None:
    """Return the reward of a rollout, which is begun again where the stack failed; None after `ATTEMPTS` of these."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await rollout(client, f"{trajectory}-{attempt}", choice)
        except (ActionLost, StackUnreachable) as error:
            print(f"{trajectory}: the stack failed in attempt {attempt}: {error}")
            await asyncio.sleep(random.uniform(0.0, attempt))
    return None


async def train(steps: int = 5, group: int = 8) -> Policy:
    """Train for some steps and return the policy."""
    policy = Policy()
    async with AsyncClient(job="asyncio-trainer") as client:
        for step in range(steps):
            choices = [policy.choose() for _ in range(group)]
            rewards = await asyncio.gather(*(reward_of(client, f"step-{step}-{number}", choice) for number, choice in enumerate(choices)))
            policy.learn(choices, list(rewards))
            print(f"step {step}: rewards {rewards}, the repair has a probability of {policy.probabilities()[1]:.2f}")
    return policy


if __name__ == "__main__":
    asyncio.run(train())
