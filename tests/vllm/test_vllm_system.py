"""Servers behind the whole system, made-up and real: one cell, two services that take turns, and servers and workers that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.reference import real_python
from tests.freezing import freeze
from tests.vllm.fakes import Fake, fake_python, gone, until
from tests.vllm.system import System, services_toml, system

pytestmark = pytest.mark.real

ITEMS = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d e f"}]


@pytest.fixture
def fakes(tmp_path: Path, models: Path) -> dict[str, Fake]:
    return {name: Fake(tmp_path / name, models, fake_python(tmp_path)) for name in ("rm", "teacher")}


@pytest.fixture
def stack(real_component: None, tmp_path: Path, models: Path, fakes: dict[str, Fake], request: pytest.FixtureRequest) -> Iterator[System]:
    """Return a stack whose servers are `made-up` or `real`."""
    made_up = request.param == "made-up"
    python = fakes["rm"].python if made_up else real_python()
    environments = {name: {"FAKE_DIR": str(fake.folder)} for name, fake in fakes.items() if made_up}
    (tmp_path / "services.toml").write_text(services_toml(models, python, environments))
    with system(tmp_path / "state", tmp_path / "services.toml") as up:
        yield up


@pytest.mark.parametrize("stack", ["made-up", pytest.param("real", marks=(pytest.mark.real, pytest.mark.timeout(1500)))], indirect=True)
def test_servers_take_turns_on_a_cell_and_one_that_is_killed_at_work_is_started_once(
    stack: System, fakes: dict[str, Fake], request: pytest.FixtureRequest
) -> None:
    made_up, close = request.node.callspec.params["stack"] == "made-up", {"abs": 1e-4, "rel": 0.0}
    scores = stack.client.score("rm", ITEMS)
    logprobs = stack.client.logprobs("teacher", [[1, 2, 3]])
    # Given a server that sleeps, of which nothing but `/is_sleeping` tells that it will not answer
    assert stack.sleeps("rm") and not stack.sleeps("teacher")
    assert not [line for fake in fakes.values() for line in fake.journal() if "ASLEEP" in line]
    server = stack.server("rm").pid
    stack.ask("rm", "GET", "/v1/models")
    with pytest.raises(httpx.ReadTimeout):
        stack.ask("rm", "POST", "/classify", {"model": "rm", "input": [[1, 2]]}, timeout_s=1.0)
    # Then it is woken before it is asked
    assert stack.client.score("rm", ITEMS) == pytest.approx(scores, **close)
    assert stack.sleeps("teacher") and not stack.sleeps("rm") and stack.server("rm").pid == server

    # And when what computes for it is killed, each action is done by one other
    killed = stack.server("rm") if made_up else stack.core("rm")
    for answer in stack.kill_while_it_works(killed, [lambda: stack.client.score("rm", ITEMS)] * 12):
        assert answer == pytest.approx(scores, **close)
    assert list(stack.client.logprobs("teacher", [[1, 2, 3]])[0]) == pytest.approx(list(logprobs[0]), **close)
    stack.live.until(lambda: stack.ends() == {"succeeded": 16})
    if made_up:
        assert [len(fakes[name].servers()) for name in ("rm", "teacher")] == [2, 1]
        leaves_what_the_next_worker_ends(stack, fakes["rm"])
    else:
        # Each start sets the log of the one before aside: that one is the killed server's.
        (log,) = (stack.live.stack.state_dir / "services").glob("vllm-rm-*.log")
        assert f"pid={server})" in log.with_name(log.name + ".1").read_text()


def leaves_what_the_next_worker_ends(stack: System, fake: Fake) -> None:
    """Kill a worker with its guard, and check that the next one of its name serves as it did and has ended what was left."""
    scores = stack.client.score("rm", ITEMS)
    worker, server, child = stack.live.process("gpu-0"), stack.server("rm"), fake.read("child")
    # Given a worker that can do nothing about its guard's end, nor the guard about its worker's
    freeze(worker.pid)
    server.parent().kill()
    worker.kill()
    until(lambda: gone(server.pid) and gone(worker.pid))
    assert not gone(child)
    stack.live.stack.restart("gpu-0")
    assert stack.client.score("rm", ITEMS) == scores
    assert gone(child) and len(fake.servers()) == 3
    assert "ended processes of vLLM servers that a worker had left: 1" in stack.live.log("gpu-0")
