"""The paper's experiments in one command: a document with every table and plot, and clear words for what cannot be run."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from app.replay.traces import write_trace
from bench import paper
from bench.paper_plan import ABLATED, QUICK, plan
from bench.workloads import ai_coding

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


SMALL = replace(
    QUICK,
    coding=4,
    batches=(2, 4, 5),
    cpu=replace(QUICK.cpu, cores=8),
    cores_per_trajectory=tuple((ratio, replace(QUICK.cpu, cores=cores)) for ratio, cores in (("0.75", 6), ("1", 8), ("3", 24))),
    search=6,
    teachers=6,
    more_teachers=9,
    mixed=4,
)
"""Sizes that show no more than that every part works, since simulations of more would take most of the time of these tests."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document of a quick run of small sizes, with a small trace in the place of recorded rollouts."""
    folder = tmp_path_factory.mktemp("bench")
    with open(folder / "rollouts.jsonl", "w", encoding="utf-8") as file:
        write_trace(ai_coding(5, 3), file)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(paper, "QUICK", SMALL)
        assert paper.main(["--quick", "--rollouts", str(folder / "rollouts.jsonl"), "--out", str(folder / "found.md")]) == 0
    assert re.search(r"^\[1/\d+\] ", said.getvalue(), re.MULTILINE)
    return folder / "found.md"


def test_a_quick_run_writes_every_table(quick: Path) -> None:
    text = quick.read_text(encoding="utf-8")
    # Then it says where it comes from, and has a table for all that was planned
    assert "`python -m bench.paper --seed 1 --processes 2 --quick" in text and "A quick run" in text
    for section in plan(SMALL, 1, Path("rollouts.jsonl")):
        assert f"## {section.title}\n" in text and section.tables
        for table in section.tables:
            chapter = text.split(f"### {table.heading}\n")[1] if table.heading else text
            assert all(f"{entry.row}" in chapter for entry in table.entries)
    assert all(f"| without {part} |" in text for part in ABLATED)
    assert "Not carried out" not in text
    assert text.count("Lowest mean ACT: ") == sum(
        table.kind == "policies" for section in plan(SMALL, 1, Path("rollouts.jsonl")) for table in section.tables
    )


def test_a_quick_run_draws_every_plot_it_shows(quick: Path) -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", quick.read_text(encoding="utf-8"))
    assert len(shown) == len(set(shown)) >= 12
    assert all("</svg>" in (quick.parent / path).read_text(encoding="utf-8") for path in shown)
    assert {path.name for path in (quick.parent / "found").iterdir()} == {Path(path).name for path in shown}
