"""Fixed questions put to real models: spoilt copies are found, sound ones never are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from app.services_file import ServiceConfig  # noqa: E402
from workers.gpu.devices import Device  # noqa: E402
from workers.gpu.engines import compute  # noqa: E402
from workers.gpu.engines.abstract import Engine  # noqa: E402
from workers.gpu.engines.host_copy import FileCopy  # noqa: E402
from workers.gpu.engines.torch_hf import TorchEngine  # noqa: E402
from workers.gpu.errors import EngineFailed, WrongAnswer  # noqa: E402
from workers.gpu.host import ServiceHost  # noqa: E402
from workers.gpu.instances import InstanceName  # noqa: E402

Task = Literal["score", "logprobs"]

MODELS: dict[Task, str] = {"score": "rm-small", "logprobs": "teacher-0"}
SIGN = 0x80


def ask(engine: Engine) -> Any:
    """Ask a question of a service's own kind."""
    if engine.task == "score":
        return engine.score([{"prompt": "2 + 2 =", "response": "4"}])
    return engine.logprobs([[40, 41, 42]]), engine.generate(["What is"], max_tokens=5)


class Spoiler:
    """Changes the sign of a weight in what is loaded from host copies, once, on one replica."""

    def __init__(self, part: float, replica: int = 0) -> None:
        self.part, self.replica, self.armed = part, replica, True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        real = FileCopy.load

        def load(copy: FileCopy, blocks: Sequence[Any]) -> None:
            real(copy, blocks)
            if self.armed:
                block, self.armed = blocks[self.replica], False
                # The last byte of a float32, which is little-endian here.
                block[int(self.part * block.numel()) // 4 * 4 + 3] ^= SIGN

        patch.setattr(FileCopy, "load", load)


def host(models: Path, state: Path, task: Task, cells: list[Device]) -> ServiceHost:
    table = {"engine": "torch", "task": task, "model": models / MODELS[task], "memory_mb": 500, "cells": [1, 2]}
    return ServiceHost(cells, {"a": ServiceConfig.model_validate(table)}, state)


@pytest.mark.parametrize("task", ["score", "logprobs"])
@pytest.mark.parametrize("part", [0.5, 0.75])
def test_one_wrong_byte_in_a_restored_model_is_noticed_and_the_right_answer_served(
    models: Path, tmp_path: Path, cells: list[Device], monkeypatch: pytest.MonkeyPatch, task: Task, part: float
) -> None:
    services = host(models, tmp_path, task, cells)
    with services.serving("a", (0,)) as engine:
        before = ask(engine)
    services.evict(InstanceName("a", (0,)))
    Spoiler(part).install(monkeypatch)

    with services.serving("a", (0,)) as engine:
        assert ask(engine) == before

    (status,) = services.status()
    assert (status.state, status.starts, status.restores, status.wrong_answers) == ("resident", 2, 0, 1)


def test_a_wrong_byte_on_one_of_several_devices_is_noticed(
    models: Path, tmp_path: Path, cells: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine("a", "score", models / "rm-small", tmp_path)
    engine.start(cells)
    engine.evict()
    Spoiler(0.5, replica=1).install(monkeypatch)

    with pytest.raises(WrongAnswer, match="a: restoring failed: fixed question 0 is answered with .*; they may not differ"):
        engine.restore(cells)

    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)
    engine.start(cells)
    assert engine.state == "resident"


@pytest.mark.parametrize("task", ["score", "logprobs"])
def test_sound_copies_pass_on_more_and_fewer_devices(models: Path, tmp_path: Path, cells: list[Device], task: Task) -> None:
    services = host(models, tmp_path, task, cells)
    services.ensure_resident("a", (0,))

    for here, there in [((0,), (0, 1)), ((0, 1), (1,)), ((1,), (1,)), ((1,), (0, 1))]:
        services.evict(InstanceName("a", here))
        services.ensure_resident("a", there)

    assert sum(one.restores for one in services.status()) == 4
    assert sum(one.wrong_answers for one in services.status()) == 0


def test_a_device_of_another_model_may_compute_other_bits(
    models: Path, tmp_path: Path, cells: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that was started on one device, and two devices, one of the same model, that compute other last bits
    first, alike, another = (Device(name, "cpu", 1000, "cpu") for name in ("cpu:0 (A)", "cpu:1 (A)", "cpu:2 (B)"))
    engine = TorchEngine("a", "score", models / "rm-small", tmp_path)
    engine.start([first])
    engine.evict()
    noise, real = [1e-6], compute.scores
    monkeypatch.setattr(compute, "scores", lambda *asked: [value + noise[0] for value in real(*asked)])
    # Then the answers of the device of another model may be off by so little
    engine.restore([another])
    engine.evict()
    # But not those of the same model, nor by more
    with pytest.raises(WrongAnswer, match="they may not differ"):
        engine.restore([alike])
    noise[0] = 0.0
    engine.start([first])
    engine.evict()
    noise[0] = 0.1
    with pytest.raises(WrongAnswer, match="they may differ by 0.0001"):
        engine.restore([another])


def test_weights_that_answer_no_numbers_are_not_started(
    models: Path, tmp_path: Path, cells: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = compute.scores
    monkeypatch.setattr(compute, "scores", lambda *asked: [value * float("nan") for value in real(*asked)])
    engine = TorchEngine("a", "score", models / "rm-small", tmp_path)

    with pytest.raises(EngineFailed, match="a: starting failed: the model answers a fixed question with nan: its weights are of no use"):
        engine.start(cells[:1])

    assert (engine.state, engine.memory_mb()) == ("failed", 0.0)
