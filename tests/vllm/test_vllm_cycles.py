"""Random cycles over four services on memory for two, with servers and devices as nasty as they are known to be.

With vLLM itself on the CPU, as many as `TANGRAM_REAL_CYCLES` says. `make test-real` shows what these are made of: servers that sleep and
wake in `tests/engines`, and one that is killed at work in `tests/vllm/real`.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from app.services_file import ServiceConfig
from app.tiny_models import make_tiny
from tests.engines.reference import expected_logprobs, expected_scores, real_python
from tests.vllm.cycles import Cycles, Question
from tests.vllm.fakes import CUDA, Fake, FakeDevices, fake_python, until
from workers.gpu.devices import Device
from workers.gpu.host import ServiceHost

pytestmark = pytest.mark.real

CALLERS = 2
SEEDS = [int(seed) for seed in os.environ.get("TANGRAM_CYCLE_SEEDS", "1").split(",")]
CYCLES = 200 if "TANGRAM_CYCLE_SEEDS" in os.environ else 30
"""Cycles of each setting: few where time is short."""
NATURE = {"model_mb": 3600, "context_mb": 200, "graphs_mb": 120, "growth_mb": [60, 30], "jitter_mb": 10, "noise": 1e-6}
SERVICES = {"judge": "score", "critic": "score", "teacher": "logprobs", "sage": "logprobs"}

REAL_CYCLES, REAL_MB = int(os.environ.get("TANGRAM_REAL_CYCLES", "0")), 2500
ON_ONE = {name: [(0,)] for name in SERVICES}
"""One device with memory for two."""
ON_TWO = {"judge": [(0,), (1,)], "critic": [(0,), (1,)], "teacher": [(0,), (1,)], "sage": [(0, 1)]}
"""Two devices with memory for one each, and one service that is computed by both."""
ON_ONE_MB, ON_TWO_MB, DECLARED_MB = 11_500.0, 7_500.0, 4_100.0
RESIDUE_MB, BLUR_MB = 300.0, 200.0
"""By how much what is booked for all sleepers may differ from what they hold, and how much memory of others moves at most."""
# Residues fit beside what is resident, though memory of others blurs what is measured: no server has to be stopped for another.


@dataclass
class Room:
    """Four services, their made-up servers and devices, and what each answers."""

    fakes: dict[str, Fake]
    devices: FakeDevices
    questions: dict[str, list[Question]]

    @property
    def booked_within_mb(self) -> float:
        """By how much bookings may be off: by what others do during a change of each service, where only the device can be measured."""
        return RESIDUE_MB if self.devices.matching else RESIDUE_MB + BLUR_MB * len(self.fakes)

    def host(self, services: dict[str, ServiceConfig], state_dir: Path) -> ServiceHost:
        devices = [replace(device, memory_mb=int(self.devices.total_mb(device))) for device in CUDA]
        return ServiceHost(devices, services, state_dir, memory=self.devices, drain_s=60.0)

    def trouble(self, draws: random.Random) -> None:
        """Have a server lie, leak or come back with other weights at its next chance, or memory of others move."""
        what, fake = draws.choice(["lie", "spoil", "spoil", "leak", "others", "others"]), draws.choice(list(self.fakes.values()))
        if what == "others":
            for device in CUDA:
                self.devices.others(device, draws.choice([0.0, BLUR_MB / 2, BLUR_MB]))
        else:
            fake.be(what)

    def held_mb(self, device: Device) -> float:
        """Return what the servers hold of a device."""
        return (self.devices.used_mb(device) or 0.0) - self.devices.of_others(device)

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        for fake in self.fakes.values():
            for what in ("lie", "spoil", "leak"):
                (fake.folder / what).unlink(missing_ok=True)

    def noted(self, *words: str) -> set[int]:
        """Return the servers that have noted one of these."""
        lines = [line.split() for fake in self.fakes.values() for line in fake.journal()]
        return {int(line[1]) for line in lines if line[0] in words}


@pytest.fixture
def room(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Room]:
    total_mb, matching = request.param
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    devices = FakeDevices(tmp_path / "gpus", total_mb, matching=matching, lag_s=0.1)
    python, fakes, questions = fake_python(tmp_path), dict[str, Fake](), dict[str, list[Question]]()
    for number, (name, task) in enumerate(SERVICES.items()):
        folder = tmp_path / name
        folder.mkdir()
        draws = random.Random(number)
        weights = [draws.uniform(-1.0, 1.0) for _ in range(512)]
        (folder / "weights").write_text(json.dumps(weights))
        fakes[name] = Fake(folder, models, python, nature={**NATURE, "seed": number}, memory=devices)
        questions[name] = [_question(models, task, weights, draws) for _ in range(5)]
    yield Room(fakes, devices, questions)


def _question(models: Path, task: str, weights: list[float], draws: random.Random) -> Question:
    def sum_of(ids: list[int]) -> float:
        return sum(place * weights[token] for place, token in enumerate(ids, 1))

    if task == "score":
        from transformers import AutoTokenizer

        from workers.gpu.engines.texts import Texts, Wording
        from workers.gpu.items import read_items

        items = [{"prompt": f"question {draws.randrange(1000)}", "response": f"{draws.randrange(1000)}"}]
        texts = Texts(AutoTokenizer.from_pretrained(models / "rm-small"), Wording())
        return Question("score", items, [sum_of(ids) for ids in texts.score_ids(read_items(items))])
    ids = [draws.randrange(512) for _ in range(draws.randrange(2, 20))]
    return Question("logprobs", [ids], [-sum_of(ids[:end]) for end in range(2, len(ids) + 1)])


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("room", "places"),
    [((ON_ONE_MB, True), ON_ONE), ((ON_ONE_MB, False), ON_ONE), ((ON_TWO_MB, True), ON_TWO)],
    ids=["one-device", "one-device-with-other-process-ids", "two-devices"],
    indirect=["room"],
)
def test_random_cycles_serve_no_wrong_answer_kill_no_healthy_server_and_leave_nothing(
    room: Room, places: dict[str, list[tuple[int, ...]]], seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a machine on which a server that is well may be silent for as long as it likes
    for limit in ("engine._ASK_S", "api._WELL_S", "api.SILENT_S"):
        monkeypatch.setattr(f"workers.gpu.engines.vllm.{limit}", 600.0)
    # And four services on memory for two
    cells = {name: sorted({len(cells) for cells in places[name]}) for name in SERVICES}
    services = {name: fake.config(SERVICES[name], memory_mb=DECLARED_MB, cells=cells[name]) for name, fake in room.fakes.items()}
    host = room.host(services, tmp_path)
    cycles = Cycles(host, places, room.questions, seed, 1e-5, room.trouble)
    # When they are asked, moved and killed in any order
    try:
        cycles.run(CYCLES, CALLERS)
        room.calm()
        cycles.settle()
        # Then what is booked on each device is what its servers hold
        until(lambda: all(abs(host.held_mb(cell) - room.held_mb(device)) <= room.booked_within_mb for cell, device in enumerate(CUDA)))
        alive = set(cycles.processes.look())
    finally:
        host.close()
    print(cycles.summary())
    # And no answer was wrong
    assert cycles.wrong == []
    # And only servers have ended of which a process was killed, or that kept memory, lost their weights or were disturbed as they loaded
    assert room.noted("started") - alive - cycles.killed == room.noted("lie", "spoil", "leak", "disturbed") - alive - cycles.killed
    # And nothing is left
    cycles.all_gone()
    until(lambda: [room.held_mb(device) for device in CUDA] == [0.0, 0.0])
    assert [host.held_mb(cell) for cell in range(len(CUDA))] == [0.0, 0.0]
    assert list((tmp_path / "t").iterdir()) == []


def real_questions(folder: Path, task: str) -> list[Question]:
    """Return questions and what transformers answers."""
    draws = random.Random(folder.name)
    if task == "score":
        items = [{"prompt": f"What is {draws.randrange(99)} + 3?", "response": f"{draws.randrange(99)}"} for _ in range(5)]
        return [Question("score", [item], [score]) for item, score in zip(items, expected_scores(folder, items), strict=True)]
    sequences = [[draws.randrange(512) for _ in range(draws.randrange(2, 40))] for _ in range(5)]
    return [Question("logprobs", [ids], said) for ids, said in zip(sequences, expected_logprobs(folder, sequences), strict=True)]


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not REAL_CYCLES, reason="TANGRAM_REAL_CYCLES says how many")
def test_random_cycles_of_real_servers_serve_no_wrong_answer_kill_no_healthy_server_and_leave_nothing(tmp_path: Path) -> None:
    # Given services on memory for half of them
    vllm = {"python": real_python(), "sleep_on_cpu": True, "start_timeout_s": 600.0, "args": ["--max-model-len", "512"]}
    services, questions = dict[str, ServiceConfig](), dict[str, list[Question]]()
    for seed, (name, task) in enumerate(SERVICES.items()):
        folder = make_tiny(tmp_path / name, "reward" if task == "score" else "teacher", seed=seed)
        table = {"engine": "vllm", "task": task, "model": folder, "memory_mb": REAL_MB, "max_concurrency": 4, "dtype": "float32"}
        services[name], questions[name] = ServiceConfig.model_validate({**table, "vllm": vllm}), real_questions(folder, task)
    host = ServiceHost([Device("cpu:0", "cpu", REAL_MB * len(SERVICES) // 2, "cpu")], services, tmp_path)
    cycles = Cycles(host, ON_ONE, questions, SEEDS[0], 1e-4)
    began = time.monotonic()
    try:
        cycles.run(REAL_CYCLES, CALLERS)
        cycles.settle()
        alive = set(cycles.processes.look())
    finally:
        host.close()
    print(f"{cycles.summary()}, {time.monotonic() - began:.0f} s")
    assert cycles.wrong == []
    assert cycles.processes.seen.keys() - alive == cycles.killed - alive
    cycles.all_gone()
    assert host.held_mb(0) == 0.0
