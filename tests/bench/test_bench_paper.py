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
from bench.paper_cases import BINS, QUANTILES, Case, Outcome, binned_cores, run_case
from bench.paper_document import Origin, write_document
from bench.paper_plan import FULL, QUICK, plan
from bench.paper_words import matched, number, on_columns, on_parts, on_policies
from bench.workloads import ai_coding
from scheduler.policies import PARTS
from scheduler.sim.simulate import Cluster
from scheduler.sim.summary import Capacity, ReplayRecord

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ORIGIN = Origin(command="python -m bench.paper", seed=1, quick=False, cases=0, processes=1, wall_s=60.0)


SMALL = replace(
    QUICK,
    coding=8,
    batches=(2, 8, 10),
    cpu=replace(QUICK.cpu, cores=8),
    cores_per_trajectory=tuple((ratio, replace(QUICK.cpu, cores=cores)) for ratio, cores in (("0.75", 6), ("1", 8), ("3", 24))),
    search=12,
    teachers=12,
    more_teachers=18,
    mixed=8,
)
"""Sizes that show no more than that every part works, since simulations of more would take most of the time of these tests."""


def outcome(mean_act: float, **changes: float) -> Outcome:
    given: dict[str, float] = {"step_duration": 100.0, "failed": 0, **changes}
    return Outcome(
        actions=10, failed=int(given["failed"]), mean_act=mean_act, p50_act=1.0, p99_act=9.0, mean_queue=0.1, mean_execution=0.8,
        mean_overhead=0.0, floor_act=0.5, step_duration=given["step_duration"], cpu_utilisation=0.5, gpu_utilisation=0.0,
        decision_us_p50=10.0, decision_us_p99=50.0, act_by_job=(("ai-coding", 1.0),), act_quantiles=(0.0, 1.0),
        cores_granted=(), wall_s=0.1,
    )  # fmt: skip


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
    # Given the document of a quick run
    text = quick.read_text(encoding="utf-8")
    # Then it says where it comes from, and has a table for all that was planned
    assert "`python -m bench.paper --seed 1 --processes 2 --quick" in text and "A quick run" in text
    for section in plan(SMALL, 1, Path("rollouts.jsonl")):
        assert f"## {section.title}\n" in text and section.tables
        for table in section.tables:
            chapter = text.split(f"### {table.heading}\n")[1] if table.heading else text
            assert all(f"{entry.row}" in chapter for entry in table.entries)
    assert all(f"| without {part} |" in text for part in PARTS)
    assert "Not carried out" not in text
    assert text.count("Lowest mean ACT: ") == sum(
        table.kind == "policies" for section in plan(SMALL, 1, Path("rollouts.jsonl")) for table in section.tables
    )


def test_a_quick_run_draws_every_plot_it_shows(quick: Path) -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", quick.read_text(encoding="utf-8"))
    assert len(shown) == len(set(shown)) >= 12
    assert all("</svg>" in (quick.parent / path).read_text(encoding="utf-8") for path in shown)
    assert {path.name for path in (quick.parent / "found").iterdir()} == {Path(path).name for path in shown}


def test_tables_are_well_formed(quick: Path) -> None:
    blocks = re.findall(r"(?:^\|.*\n)+", quick.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(blocks) >= 15
    assert all(len({line.count("|") for line in block.splitlines()}) == 1 for block in blocks)


def test_the_full_plan_has_the_sizes_of_the_paper() -> None:
    sections = {section.name: section for section in plan(FULL, 1, None)}
    (batch,) = sections["batch"].tables
    assert {int(entry.column) for entry in batch.entries} == {256, 512, 768, 1024, 1280, 1536}
    assert {entry.case.cluster.nodes * entry.case.cluster.cores for entry in batch.entries} == {1280}
    (cores,) = sections["cores"].tables
    assert {entry.case.cluster.nodes * entry.case.cluster.cores / entry.case.trajectories for entry in cores.entries} == {0.75, 1.0, 3.0}
    assert {entry.case.without for table in sections["ablation"].tables for entry in table.entries} == {(), *((part,) for part in PARTS)}


def test_without_recorded_rollouts_the_document_says_so(tmp_path: Path) -> None:
    # Given no trace of recorded rollouts
    sections = [section for section in plan(QUICK, 1, None) if section.name == "rollouts"]
    # When
    write_document(tmp_path / "found.md", sections, {}, ORIGIN)
    # Then
    assert "There was no trace of recorded rollouts" in (tmp_path / "found.md").read_text(encoding="utf-8")


def test_sentences_follow_the_figures_whoever_is_first() -> None:
    # Given outcomes in which ours is second
    (table,) = next(section for section in plan(QUICK, 1, None) if section.name == "ai-coding").tables
    acts = {"paper": 1.0, "elastic": 2.0}
    found = {entry.case: outcome(acts.get(entry.row, 3.0), failed=4 if entry.row == "fcfs" else 0) for entry in table.entries}
    # When
    said = on_policies(table, found)
    # Then
    assert said.startswith("Lowest mean ACT: `paper` with 1.00 s, 2.00 × the floor.")
    assert "`paper` 0.500 ×" in said and "`static:4` 1.50 ×" in said
    assert "Not carried out: 4 of 10 under `fcfs`" in said


def test_sentences_on_columns_and_parts_follow_the_figures() -> None:
    sections = {section.name: section for section in plan(QUICK, 1, None)}
    (batch,) = sections["batch"].tables
    found = {entry.case: outcome(2.0 if entry.row == "elastic" else 1.0) for entry in batch.entries}
    assert "`elastic` is number 7 of 7" in on_columns(batch, found) and "`paper` 0.500" in on_columns(batch, found)
    parts = sections["ablation"].tables[0]
    found = {entry.case: outcome(1.5 if entry.row == "without resizing" else 1.0) for entry in parts.entries}
    assert "largest first: without resizing +50.0%" in on_parts(parts, found)


def test_a_case_keeps_the_distribution_of_act() -> None:
    found = run_case(Case(workload="ai-coding", trajectories=4, policy="fixed:4", cluster=Cluster(cores=16), seed=1))
    assert len(found.act_quantiles) == QUANTILES + 1 and list(found.act_quantiles) == sorted(found.act_quantiles)
    assert found.failed == 0 and found.mean_act >= found.floor_act


def test_cores_over_time_are_means_of_equal_stretches() -> None:
    # Given a run of ten seconds that begins at 2 and holds 4 cores for its first half
    run = ReplayRecord(
        policy="fcfs", trajectories=1, actions=[], first_arrival_s=2.0, last_result_s=12.0, capacity=Capacity(cores=8, cells=0),
        cores_granted=[(2.0, 4.0), (7.0, 0.0)],
    )  # fmt: skip
    # When
    found = binned_cores(run)
    # Then
    assert len(found) == BINS and found[0] == (0.0, pytest.approx(4.0)) and found[-1][1] == pytest.approx(0.0)
    assert sum(cores for _, cores in found) / BINS == pytest.approx(2.0)
    assert binned_cores(replace(run, cores_granted=())) == ()


@pytest.mark.parametrize("recorded", [True, False])
def test_cores_over_time_are_drawn_where_runs_recorded_them(tmp_path: Path, recorded: bool) -> None:
    # Given
    section = next(section for section in plan(QUICK, 1, None) if section.name == "ai-coding")
    cores = ((0.0, 1.0), (1.0, 0.0)) if recorded else ()
    found = {entry.case: replace(outcome(1.0), cores_granted=cores) for entry in section.tables[0].entries}
    # When
    write_document(tmp_path / "found.md", [section], found, ORIGIN)
    # Then
    text = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert ("found/cores-ai-coding.svg" in text) == recorded == (tmp_path / "found" / "cores-ai-coding.svg").exists()
    assert ("the runs did not record them" in text) != recorded


def test_numbers_are_short_and_comparisons_say_how_far_off() -> None:
    assert [number(value) for value in (0, 0.0001, 0.9999, 1.234, 12.34, 1234.5)] == ["0", "<0.001", "1.00", "1.23", "12.3", "1,234"]
    assert matched(1.0, 1.05) == "matched" and matched(1.0, 0.5) == "not matched (-50%)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--only", "nothing"), "--only"),
        (("--processes", "0"), "--processes: must be at least 1, not 0"),
        (("--rollouts", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--out", "/tmp"), "--out: must name a file"),
        (("--seed", "x"), "--seed"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = paper.main(options)
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == "" and says in captured.err and captured.err.count("\n") == 1
