"""The benchmark's document: Markdown tables, sentences and plots out of outcomes.

Nothing is concluded here by hand: tables are figures of `Outcome`, sentences come from `bench.paper_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import plots
from bench.paper_cases import QUANTILES, Outcome, trace_of
from bench.paper_plan import Section, Table
from bench.paper_words import (
    NEAR,
    OURS,
    Outcomes,
    column_names,
    grid_of,
    matched,
    number,
    on_columns,
    on_decisions,
    on_parts,
    on_policies,
    on_saving,
)
from bench.workloads import pod_use

PUBLISHED_USE, PUBLISHED_RATIO = 0.47, 4.3
PUBLISHED_PARTS: tuple[tuple[float, float, float | None], ...] = (
    (0.975, 0.015, None),
    (1.206, 0.428, None),
    (0.621, 0.081, 0.201),
    (0.705, 15.05, 0.240),
)
"""Seconds of execution, queueing and overhead in the paper, in the order of the calibration's cases. The overhead of CPU
actions is the system's own, which a simulation does not have; that of GPU actions is mostly restoring."""

HOW_TO_READ = """\
ACT is submission to result: queueing, background (wanting a core there and having none), overhead (restoring a model) and
execution. The *floor* is the mean with every action on its best amount and no queue. *Step* is first arrival to last result.
*CPU* and *GPU* are the shares of the offered unit-seconds in which an action ran. *Decision* is the time that one scheduling
decision of the core takes, measured with a clock. Everything else is virtual time, without machines, network or workers.
Values are seconds, unless a column says otherwise. Columns with "×" are multiples of `elastic`'s."""


def _share(value: float) -> str:
    return f"{value:.0%}" if value else "–"


POLICY_COLUMNS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("mean ACT", lambda found: number(found.mean_act)),
    ("÷ floor", lambda found: number(found.over_floor)),
    ("p50 ACT", lambda found: number(found.p50_act)),
    ("p99 ACT", lambda found: number(found.p99_act)),
    ("queue", lambda found: number(found.mean_queue)),
    ("background", lambda found: number(found.mean_background)),
    ("execution", lambda found: number(found.mean_execution)),
    ("overhead", lambda found: number(found.mean_overhead)),
    ("step", lambda found: number(found.step_duration)),
    ("CPU", lambda found: _share(found.cpu_utilisation)),
    ("GPU", lambda found: _share(found.gpu_utilisation)),
    ("decision p50 µs", lambda found: number(found.decision_us_p50)),
    ("decision p99 µs", lambda found: number(found.decision_us_p99)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a document comes from: the command that repeats it, what it was asked for, and how long it took."""

    command: str
    seed: int
    quick: bool
    cases: int
    processes: int
    wall_s: float


def write_document(path: Path, sections: Sequence[Section], outcomes: Outcomes, origin: Origin) -> None:
    """Write the document to `path` and its plots to a folder beside it, of the same name without the suffix."""
    writer = _Writer(path.with_suffix(""), outcomes)
    parts = [_opening(origin), *(writer.section(section) for section in sections)]
    entries = [entry for section in sections for table in section.tables for entry in table.entries]
    decisions = on_decisions(entries, outcomes)
    if decisions:
        parts.append(f"## Time to decide\n\n{decisions}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _opening(origin: Origin) -> str:
    ran = f"{origin.cases} simulations, {origin.processes} at a time, in {origin.wall_s / 60:.1f} minutes"
    small = "A quick run, a fortieth in size: it shows that the benchmark works, not what policies are worth.\n\n" if origin.quick else ""
    return f"# Benchmarks\n\nWritten by `{origin.command}` (seed {origin.seed}): {ran}.\n\n{small}{HOW_TO_READ}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class _Writer:
    """Turns sections into Markdown, drawing their plots into `folder` on the way."""

    def __init__(self, folder: Path, outcomes: Outcomes) -> None:
        self._folder = folder
        self._outcomes = outcomes

    def section(self, section: Section) -> str:
        parts = [f"## {section.title}"]
        parts.extend(text for text in (section.text, section.missing) if text)
        for table in section.tables:
            if table.heading:
                parts.append(f"### {table.heading}")
            parts.extend(part for part in self._table(table) if part)
        return "\n\n".join(parts)

    def _table(self, table: Table) -> list[str]:
        if table.kind == "policies":
            return self._policies(table)
        if table.kind == "matrix":
            return self._matrix(table)
        return self._ablation(table) if table.kind == "ablation" else self._calibration(table)

    def _policies(self, table: Table) -> list[str]:
        found = {entry.row: self._outcomes[entry.case] for entry in table.entries}
        ours = found[OURS]
        head = ["policy", *(name for name, _ in POLICY_COLUMNS), "ACT ×", "step ×"]
        rows = [
            [
                f"`{row}`",
                *(shown(each) for _, shown in POLICY_COLUMNS),
                number(each.mean_act / ours.mean_act),
                number(each.step_duration / ours.step_duration),
            ]
            for row, each in found.items()
        ]
        return [
            _markdown(head, rows),
            on_policies(table, self._outcomes),
            self._by_job(table, found),
            self._spread(table),
            self._over_time(table),
        ]

    def _by_job(self, table: Table, found: dict[str, Outcome]) -> str:
        if table.name != "mixed":
            return ""
        rows = [[f"`{row}`", *(number(act) for _, act in each.act_by_job)] for row, each in found.items()]
        return "Mean ACT by job:\n\n" + _markdown(["policy", *(job for job, _ in found[OURS].act_by_job)], rows)

    def _spread(self, table: Table) -> str:
        """Draw the distribution of ACT, from a millisecond on."""
        series = {
            entry.row: [(max(act, 1e-3), 100 * point / QUANTILES) for point, act in enumerate(self._outcomes[entry.case].act_quantiles)]
            for entry in table.entries
        }
        axes = plots.Axes(title=f"ACT, {table.name}: {table.heading}", x="ACT, s", y="actions up to that, %", log="x")
        plots.lines(series, axes, self._path(f"act-{table.name}"))
        return self._image(f"act-{table.name}", f"Distribution of ACT, {table.name}")

    def _over_time(self, table: Table) -> str:
        on_cpu = {entry.row: self._outcomes[entry.case] for entry in table.entries if self._outcomes[entry.case].cpu_utilisation > 0}
        series = {row: found.cores_granted for row, found in on_cpu.items() if found.cores_granted}
        if not on_cpu:
            return ""
        if not series:
            return "No plot of the cores granted over time: the runs did not record them."
        axes = plots.Axes(title=f"Cores granted, {table.name}: {table.heading}", x="s from the first arrival", y="cores")
        plots.lines(series, axes, self._path(f"cores-{table.name}"))
        return self._image(f"cores-{table.name}", f"Cores granted over time, {table.name}")

    def _matrix(self, table: Table) -> list[str]:
        grid, columns = grid_of(table, self._outcomes), column_names(table)
        series = {}
        for row, cells in grid.items():
            series[row] = [(float(column), cells[column].mean_act) for column in columns if column in cells]
        axes = plots.Axes(title=table.heading, x=table.columns, y="mean ACT, s", log="y")
        plots.lines(series, axes, self._path(f"matrix-{table.name}"), marker="o")
        compared = on_saving(table, self._outcomes) if table.name in ("gpus", "rollouts") else ""
        return [
            f"Mean ACT (÷ floor) by {table.columns}:",
            self._cells(table, lambda found: f"{number(found.mean_act)} ({number(found.over_floor)})"),
            f"Step duration by {table.columns}:",
            self._cells(table, lambda found: number(found.step_duration)),
            on_columns(table, self._outcomes),
            compared,
            self._image(f"matrix-{table.name}", f"Mean ACT by {table.columns}"),
        ]

    def _cells(self, table: Table, shown: Callable[[Outcome], str]) -> str:
        grid, columns = grid_of(table, self._outcomes), column_names(table)
        rows = [[f"`{row}`", *(shown(cells[column]) if column in cells else "" for column in columns)] for row, cells in grid.items()]
        return _markdown(["policy", *columns], rows)

    def _ablation(self, table: Table) -> list[str]:
        found = {entry.row: self._outcomes[entry.case] for entry in table.entries}
        whole = found[table.entries[0].row]
        acts, parts = ("mean ACT", "÷ floor", "p50 ACT", "p99 ACT"), ("queue", "background", "execution")
        names = (*acts, *parts, "step", "CPU", "decision p50 µs", "decision p99 µs")
        columns = [column for column in POLICY_COLUMNS if column[0] in names]
        rows = [[row, *(shown(each) for _, shown in columns), f"{each.mean_act / whole.mean_act - 1:+.1%}"] for row, each in found.items()]
        axes = plots.Axes(title=table.heading, x="mean ACT, s", y="")
        plots.bars({row: each.mean_act for row, each in found.items()}, axes, self._path(table.name), line=whole.mean_act)
        return [
            _markdown(["elastic", *(name for name, _ in columns), "change of mean ACT"], rows),
            on_parts(table, self._outcomes),
            self._image(table.name, f"Mean ACT without each part: {table.heading}"),
        ]

    def _calibration(self, table: Table) -> list[str]:
        *measured, pods = table.entries
        trace = trace_of(pods.case.workload, pods.case.trajectories, pods.case.seed, pods.case.file)
        rows = []
        for cores in (1, 4):
            use = pod_use(trace, cores)
            name = f"ai-coding, share of a trajectory's life in use, own pods of {cores} core{'s' if cores > 1 else ''}"
            rows.append([name, f"{PUBLISHED_USE:.0%}", f"{use:.0%}", matched(PUBLISHED_USE, use)])
        for entry, published in zip(measured, PUBLISHED_PARTS, strict=True):
            found = self._outcomes[entry.case]
            parts = zip(
                ("execution", "queueing", "overhead"), published, (found.mean_execution, found.mean_queue, found.mean_overhead), strict=True
            )
            for name, said_s, found_s in parts:
                if said_s is not None:
                    rows.append([f"{entry.row}: mean {name} under `paper`, s", number(said_s), number(found_s), matched(said_s, found_s)])
        ratio = self._outcomes[pods.case].mean_act / self._outcomes[measured[0].case].mean_act
        rows.append([f"{pods.row}: mean ACT ÷ `paper`'s", number(PUBLISHED_RATIO), number(ratio), matched(PUBLISHED_RATIO, ratio)])
        hits = sum(row[-1] == "matched" for row in rows)
        said = f"{hits} of {len(rows)} figures are within {NEAR:.0%} of the published ones."
        return [_markdown(["figure", "published", "here", ""], rows), said]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.svg"

    def _image(self, name: str, says: str) -> str:
        return f"![{says}]({self._folder.name}/{name}.svg)"
