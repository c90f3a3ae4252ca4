"""Made-up servers behind the whole system: one cell, two services that take turns, and a server that is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.freezing import freeze
from tests.vllm.fakes import Fake, fake_python, gone, until
from tests.vllm.system import System, services_toml, system

ITEMS = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d e f"}]


@pytest.fixture
def fakes(tmp_path: Path, models: Path) -> dict[str, Fake]:
    return {name: Fake(tmp_path / name, models, fake_python(tmp_path)) for name in ("rm", "teacher")}


@pytest.fixture
def stack(tmp_path: Path, models: Path, fakes: dict[str, Fake]) -> Iterator[System]:
    services = tmp_path / "services.toml"
    environments = {name: {"FAKE_DIR": str(fake.folder)} for name, fake in fakes.items()}
    services.write_text(services_toml(models, fakes["rm"].python, environments))
    with system(tmp_path / "state", services) as up:
        yield up


def test_servers_take_turns_on_a_cell_and_one_that_is_killed_is_started_again(stack: System, fakes: dict[str, Fake]) -> None:
    scores = stack.client.score("rm", ITEMS)
    logprobs = stack.client.logprobs("teacher", [[1, 2, 3]])
    assert stack.sleeps("rm") and not stack.sleeps("teacher")
    assert stack.client.score("rm", ITEMS) == scores
    assert stack.sleeps("teacher") and not stack.sleeps("rm")

    answers = stack.kill_while_it_works(stack.server("rm"), [lambda: stack.client.score("rm", ITEMS)] * 12)
    assert answers == [scores] * 12
    assert stack.client.logprobs("teacher", [[1, 2, 3]]) == logprobs
    assert [len(fakes[name].servers()) for name in ("rm", "teacher")] == [2, 1]
    assert not [line for fake in fakes.values() for line in fake.journal() if "ASLEEP" in line]
    stack.live.until(lambda: stack.ends() == {"succeeded": 16})


def test_what_a_worker_leaves_that_is_killed_with_its_guard_is_ended_by_the_next_of_its_name(stack: System, fakes: dict[str, Fake]) -> None:
    scores = stack.client.score("rm", ITEMS)
    worker, server, child = stack.live.process("gpu-0"), stack.server("rm"), fakes["rm"].read("child")
    # Given a worker that can do nothing about its guard's end, nor the guard about its worker's
    freeze(worker.pid)
    server.parent().kill()
    worker.kill()
    until(lambda: gone(server.pid) and gone(worker.pid))
    assert not gone(child)
    # When the next one is started
    stack.live.stack.restart("gpu-0")
    # Then it serves as the one before, and has ended what was left
    assert stack.client.score("rm", ITEMS) == scores
    assert gone(child) and len(fakes["rm"].servers()) == 2
    assert "ended processes of vLLM servers that a worker had left: 1" in stack.live.log("gpu-0")
