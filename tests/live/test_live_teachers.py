"""Nine teachers where memory holds three, through the whole system: every answer right, and the worker's memory within bounds.

CPU devices count the process's own memory, so that what a budget is worth can be seen from outside: in the resident set of
the worker's process, sampled while the calls go through.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


from app.local.stack import StackPlan
from app.tiny_models import make_tiny
from tests.live.support import Live, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux counts it")

TEACHERS = 9
HIDDEN = 768
MIB = 1 << 20
SLACK_MIB = 30
"""What nine teachers keep without their weights: tokenizers, empty modules, what the C library has not given back."""
SEQUENCES = [[5, 17, 33, 200, 7], list(range(40, 72))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make nine teachers of some 40 MB each, a small one to warm up with, and their services file."""
    folder = tmp_path_factory.mktemp("teachers")
    make_tiny(folder / "first", "teacher", 99)
    tables = [table("first", 5)]
    for index in range(TEACHERS):
        make_tiny(folder / f"teacher-{index}", "teacher", index, HIDDEN)
        tables.append(table(f"teacher-{index}", 45))
    (folder / "services.toml").write_text("\n".join(tables))
    return folder


def table(name: str, memory_mb: int) -> str:
    return f'[services.{name}]\nengine = "torch"\ntask = "logprobs"\nmodel = "{name}"\ncells = [1]\nmemory_mb = {memory_mb}\n'


class Memory:
    """The most resident memory of a process while it was watched, bytes."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._over = threading.Event()
        self.most = self.now()

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    def watch(self) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, self.now())

    def end(self) -> None:
        self._over.set()


@contextmanager
def watched(live: Live) -> Iterator[Memory]:
    memory = Memory(live.process("gpu-0"))
    thread = threading.Thread(target=memory.watch)
    thread.start()
    try:
        yield memory
    finally:
        memory.end()
        thread.join()


def expected(folder: Path) -> list[list[float]]:
    """Give the log-probs that transformers computes, a sequence by itself."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    with torch.inference_mode():
        for ids in SEQUENCES:
            known = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], dim=-1)
            out.append(known.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())
    return out


def test_nine_teachers_on_memory_for_three_answer_as_they_do_by_themselves(folder: Path, tmp_path: Path) -> None:
    size = (folder / "teacher-0" / "model.safetensors").stat().st_size / MIB
    names = [f"teacher-{index}" for index in range(TEACHERS)]
    # Given cells for three
    plan = StackPlan(nodes=0, api_nodes=0, cells=3, cell_memory_mb=45, services_file=folder / "services.toml")
    with running(tmp_path, plan) as live, live.client("distillation") as client:
        # What torch and transformers take for the first call of all is no model's.
        client.logprobs("first", SEQUENCES)
        before = live.process("gpu-0").memory_info().rss
        # When all nine are asked, and then again, each brought back from its copy
        with watched(live) as memory:
            started, restored = ([list(client.logprobs(name, SEQUENCES)) for name in names] for _ in range(2))
            end = memory.now()
    # Then every answer is right, and the same to the last bit after a restore
    assert started == restored
    for name, answers in zip(names, started, strict=True):
        for found, wanted in zip(answers, expected(folder / name), strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
    # And no teacher answers like another
    assert len({tuple(rows[0]) for rows in started}) == TEACHERS
    # And the process holds three teachers; while one is loaded, its file and its tensors come on top
    assert 0.95 * 3 * size < (end - before) / MIB < 3 * size + SLACK_MIB
    assert (memory.most - before) / MIB < (3 + 2) * size + SLACK_MIB
