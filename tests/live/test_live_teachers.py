"""Five teachers where memory holds two, through the whole system: every answer right, also after a restore."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


from app.local.stack import StackPlan
from app.tiny_models import make_tiny
from tests.live.support import running

pytestmark = pytest.mark.real

TEACHERS = 5
SEQUENCES = [[5, 17, 33, 200, 7], list(range(40, 72))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make teachers, each declared to fill a cell, and their services file."""
    folder = tmp_path_factory.mktemp("teachers")
    tables = []
    for index in range(TEACHERS):
        make_tiny(folder / f"teacher-{index}", "teacher", index)
        tables.append(table(f"teacher-{index}", 45))
    (folder / "services.toml").write_text("\n".join(tables))
    return folder


def table(name: str, memory_mb: int) -> str:
    return f'[services.{name}]\nengine = "torch"\ntask = "logprobs"\nmodel = "{name}"\ncells = [1]\nmemory_mb = {memory_mb}\n'


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


def test_teachers_of_whom_memory_holds_a_part_answer_as_they_do_by_themselves(folder: Path, tmp_path: Path) -> None:
    names = [f"teacher-{index}" for index in range(TEACHERS)]
    # Given cells for two
    plan = StackPlan(nodes=0, api_nodes=0, cells=2, cell_memory_mb=45, services_file=folder / "services.toml")
    with running(tmp_path, plan) as live, live.client("distillation") as client:
        # When all are asked, and then again, each brought back from its copy
        started, restored = ([list(client.logprobs(name, SEQUENCES)) for name in names] for _ in range(2))
    # Then every answer is right, and the same to the last bit after a restore
    assert started == restored
    for name, answers in zip(names, started, strict=True):
        for found, wanted in zip(answers, expected(folder / name), strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
    # And no teacher answers like another
    assert len({tuple(rows[0]) for rows in started}) == TEACHERS
