"""Servers that wake with other weights: none of them answers a user, and no sound one is killed for a little noise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.fakes import CUDA, Fake, gone
from workers.gpu.engines import canary
from workers.gpu.engines.abstract import Engine
from workers.gpu.host import ServiceHost
from workers.gpu.instances import InstanceName, InstanceStatus

ALLOWED = 1e-4
"""What answers of the fake server, all of which are small, may differ by in float32."""


def host_of(fake: Fake, task: str, **more: Any) -> ServiceHost:
    return ServiceHost(CUDA, {"rm": fake.config(task, **more)}, fake.folder, factory=fake.make, memory=fake.memory, drain_s=60.0)


def ask(engine: Engine) -> list[Any]:
    """Ask a question of a service's own kind."""
    return engine.score([{"prompt": "a", "response": "b"}]) if engine.task == "score" else engine.logprobs([[40, 41, 42]])


def asked_again(host: ServiceHost) -> list[Any]:
    """Evict the service and ask it, which wakes it."""
    host.evict(InstanceName("rm", (0,)))
    with host.serving("rm", (0,)) as engine:
        return ask(engine)


def on(host: ServiceHost) -> InstanceStatus:
    (status,) = host.status()
    return status


@pytest.mark.parametrize(("task", "sign"), [("score", 1.0), ("logprobs", -1.0)])
def test_a_server_that_wakes_is_left_alone_up_to_the_noise_of_its_numbers_and_replaced_beyond(fake: Fake, task: str, sign: float) -> None:
    host = host_of(fake, task)
    with host.serving("rm", (0,)) as engine:
        before = ask(engine)
    # Given answers that are off by less than is allowed; then the server serves
    for part in (0.9, -0.9, 0.0):
        fake.be("spoilt", str(sign * part * ALLOWED))
        asked_again(host)
    assert (len(fake.servers()), on(host).starts, on(host).restores, on(host).wrong_answers) == (1, 1, 3, 0)
    # When they are off by more
    woken = len(fake.journal())
    fake.be("spoilt", str(1.1 * sign * ALLOWED))
    assert asked_again(host) == before
    # Then another server answers, and the one that woke was asked nothing but the fixed questions
    first, second = fake.servers()
    assert gone(first) and (on(host).starts, on(host).wrong_answers) == (2, 1)
    since = fake.journal()[woken:]
    to_the_first = [line for line in since[: since.index(f"started {second}")] if line.startswith("/")]
    assert 1 <= len(to_the_first) <= len(canary.questions(512, 512))


@pytest.mark.parametrize("words", [{"dtype": "bfloat16"}, {"vllm": {"args": ["--dtype=bfloat16"]}}])
def test_in_half_precision_there_may_be_more_noise(fake: Fake, words: dict[str, Any]) -> None:
    host = host_of(fake, "score", **words)
    host.ensure_resident("rm", (0,))
    fake.be("spoilt", "0.03")

    asked_again(host)

    assert (on(host).wrong_answers, len(fake.servers())) == (0, 1)
