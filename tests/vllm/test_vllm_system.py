"""Made-up servers behind the whole system: one cell, two services that take turns, and servers and workers that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.freezing import freeze
from tests.vllm.fakes import Fake, fake_python, gone, until
from tests.vllm.system import Served, System, services_toml, system, take_turns

pytestmark = pytest.mark.real

ITEMS = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d e f"}]


def test_servers_take_turns_on_a_cell_and_one_killed_at_work_is_started_once(real_component: None, tmp_path: Path, models: Path) -> None:
    fakes = {name: Fake(tmp_path / name, models, fake_python(tmp_path)) for name in ("rm", "teacher")}
    rm, teacher = (
        Served(model=models / model, env={"FAKE_DIR": str(fake.folder)})
        for model, fake in zip(("rm-small", "teacher-0"), fakes.values(), strict=True)
    )
    (tmp_path / "services.toml").write_text(services_toml(fakes["rm"].python, rm, teacher))
    with system(tmp_path / "state", tmp_path / "services.toml") as stack:
        take_turns(stack, ITEMS, [[1, 2, 3]], "classify", lambda: stack.server("rm"))
        # The one question that a server was asked asleep is the test's own
        assert [line for fake in fakes.values() for line in fake.journal() if "ASLEEP" in line] == ["ASLEEP /classify 1"]
        assert [len(fakes[name].servers()) for name in ("rm", "teacher")] == [2, 1]
        leaves_what_the_next_worker_ends(stack, fakes["rm"])


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
