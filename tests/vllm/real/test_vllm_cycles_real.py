"""As many of the random cycles of `tests/vllm/test_vllm_cycles.py` as `TANGRAM_REAL_CYCLES` says, with vLLM itself on the CPU.

`make test-real` shows what they are made of: servers that sleep and wake in `tests/engines`, and one that is killed at work in
`tests/vllm/real/test_vllm_real_models.py`.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from app.services_file import ServiceConfig
from app.tiny_models import make_tiny
from tests.engines.reference import expected_logprobs, expected_scores, real_python
from tests.vllm.cycles import Cycles, Question
from workers.gpu.devices import Device
from workers.gpu.host import ServiceHost

CYCLES = int(os.environ.get("TANGRAM_REAL_CYCLES", "0"))
SEED = int(os.environ.get("TANGRAM_CYCLE_SEEDS", "1"))
DECLARED_MB = 2500
SERVICES = {"judge": ("reward", 0), "teacher": ("teacher", 0), "critic": ("reward", 1), "sage": ("teacher", 1)}

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600), pytest.mark.skipif(not CYCLES, reason="TANGRAM_REAL_CYCLES says how many")]


def questions_for(folder: Path, kind: str) -> list[Question]:
    """Return questions and what transformers answers."""
    draws = random.Random(folder.name)
    if kind == "reward":
        items = [{"prompt": f"What is {draws.randrange(99)} + 3?", "response": f"{draws.randrange(99)}"} for _ in range(5)]
        return [Question("score", [item], [score]) for item, score in zip(items, expected_scores(folder, items), strict=True)]
    sequences = [[draws.randrange(512) for _ in range(draws.randrange(2, 40))] for _ in range(5)]
    return [Question("logprobs", [ids], said) for ids, said in zip(sequences, expected_logprobs(folder, sequences), strict=True)]


def test_random_cycles_of_real_servers_serve_no_wrong_answer_kill_no_healthy_server_and_leave_nothing(tmp_path: Path) -> None:
    # Given services on memory for half of them
    python = real_python()
    folders = {name: make_tiny(tmp_path / name, kind, seed=seed) for name, (kind, seed) in SERVICES.items()}  # type: ignore[arg-type]
    questions = {name: questions_for(folder, SERVICES[name][0]) for name, folder in folders.items()}
    vllm = {"python": python, "sleep_on_cpu": True, "start_timeout_s": 600.0, "args": ["--max-model-len", "512"]}
    services = {
        name: ServiceConfig.model_validate(
            {
                "engine": "vllm",
                "task": "score" if SERVICES[name][0] == "reward" else "logprobs",
                "model": folder,
                "memory_mb": DECLARED_MB,
                "max_concurrency": 4,
                "dtype": "float32",
                "vllm": vllm,
            }
        )
        for name, folder in folders.items()
    }
    host = ServiceHost([Device("cpu:0", "cpu", DECLARED_MB * len(SERVICES) // 2, "cpu")], services, tmp_path)
    cycles = Cycles(host, {name: [(0,)] for name in SERVICES}, questions, SEED, 1e-4)
    began = time.monotonic()
    # When they are asked, moved and killed in any order
    try:
        cycles.run(CYCLES, callers=2)
        cycles.settle()
        alive = set(cycles.processes.look())
    finally:
        host.close()
    # Then no answer was wrong, no server has ended but those that were killed, and nothing is left
    print(f"{cycles.summary()}, {time.monotonic() - began:.0f} s")
    assert cycles.wrong == []
    assert cycles.processes.seen.keys() - alive == cycles.killed - alive
    cycles.all_gone()
    assert host.held_mb(0) == 0.0
