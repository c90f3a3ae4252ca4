"""Servers that wake with other numbers: how much is noise. What becomes of the others is in `tests/engines/test_engine_canary.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.fakes import CUDA, Fake
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName

ALLOWED = 1e-4
"""What answers of the fake server, all of which are small, may differ by in float32."""


@pytest.mark.parametrize(
    ("task", "words", "noise", "wrong"),
    [
        ("score", {}, 1.1 * ALLOWED, 1),
        ("logprobs", {}, -0.9 * ALLOWED, 0),
        ("score", {"dtype": "bfloat16"}, 0.03, 0),
        ("score", {"vllm": {"args": ["--dtype=bfloat16"]}}, 0.03, 0),
    ],
)
def test_a_server_that_wakes_is_left_alone_up_to_the_noise_of_its_numbers_and_replaced_beyond(
    fake: Fake, task: str, words: dict[str, Any], noise: float, wrong: int
) -> None:
    host = ServiceHost(CUDA, {"rm": fake.config(task, **words)}, fake.folder, factory=fake.make, memory=fake.memory, drain_s=60.0)
    host.ensure_resident("rm", (0,))
    fake.be("spoilt", str(noise))
    host.evict(InstanceName("rm", (0,)))
    host.ensure_resident("rm", (0,))
    (status,) = host.status()
    assert (status.restores, status.wrong_answers, len(fake.servers())) == (1 - wrong, wrong, 1 + wrong)
