"""verl's reward worker, with nothing of it replaced but what tokenizes the rollout, against a reward model behind the gateway."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="verl is not installed")

from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

from tests.clients.conftest import Served
from tests.clients.rows import shows

pytestmark = pytest.mark.real

TEXT = "<|user|>1 + 1 =<|assistant|>2"


class Worker(RewardLoopWorker):
    """A worker whose rollout is a text already."""

    async def _preprocess_reward_inputs(self, data: str) -> str:
        return data


@shows(
    "verl",
    "RewardLoopWorker.compute_score_disrm (vllm), the worker itself",
    "works where the router's address is `tangram:TOKEN@HOST:PORT/services/NAME`",
)
async def test_verls_reward_worker_reads_a_score(served: Served) -> None:
    worker = object.__new__(Worker)  # its constructor starts a reward model of its own
    worker.reward_router_address = f"tangram:{served.token('tests')}@{served.url.removeprefix('http://')}/services/judge"
    worker.config = OmegaConf.create({"reward": {"reward_model": {"model_path": "/models/rm", "rollout": {"name": "vllm"}}}})
    with served.live.client("tests") as client:
        assert await worker.compute_score_disrm(TEXT) == {"reward_score": client.score("judge", [{"response": TEXT}])[0]}
