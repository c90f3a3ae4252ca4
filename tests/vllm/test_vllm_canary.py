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


@pytest.mark.parametrize(("task", "off_by"), [("score", 1.1 * ALLOWED), ("logprobs", -1.1 * ALLOWED)])
def test_a_server_that_wakes_with_other_weights_answers_nobody_and_another_is_started(fake: Fake, task: str, off_by: float) -> None:
    host = host_of(fake, task)
    with host.serving("rm", (0,)) as engine:
        before = ask(engine)
    woken = len(fake.journal())
    fake.be("spoilt", str(off_by))

    assert asked_again(host) == before

    first, second = fake.servers()
    assert gone(first) and not gone(second)
    assert (on(host).state, on(host).starts, on(host).restores, on(host).wrong_answers) == ("resident", 2, 0, 1)
    # The server that woke was asked nothing but the fixed questions
    since = fake.journal()[woken:]
    to_the_first = [line for line in since[: since.index(f"started {second}")] if line.startswith("/")]
    assert 1 <= len(to_the_first) <= len(canary.questions(512, 512))


@pytest.mark.parametrize("task", ["score", "logprobs"])
def test_a_server_whose_answers_are_off_by_noise_is_left_alone(fake: Fake, task: str) -> None:
    host = host_of(fake, task)
    host.ensure_resident("rm", (0,))

    for off_by in (0.9 * ALLOWED, -0.9 * ALLOWED, 0.0):
        fake.be("spoilt", str(off_by))
        asked_again(host)

    assert len(fake.servers()) == 1
    assert (on(host).starts, on(host).restores, on(host).wrong_answers) == (1, 3, 0)


@pytest.mark.parametrize("words", [{"dtype": "bfloat16"}, {"vllm": {"args": ["--dtype=bfloat16"]}}])
def test_in_half_precision_there_may_be_more_noise(fake: Fake, words: dict[str, Any]) -> None:
    host = host_of(fake, "score", **words)
    host.ensure_resident("rm", (0,))
    fake.be("spoilt", "0.03")

    asked_again(host)

    assert (on(host).wrong_answers, len(fake.servers())) == (0, 1)
