"""The sentences of the benchmark's document: each is made from outcomes, so that none can outlive its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.paper_cases import Case, Outcome
from bench.paper_plan import Entry, Table

Outcomes = Mapping[Case, Outcome]
Grid = dict[str, dict[str, Outcome]]
"""Outcomes of a matrix by row, then column."""

OURS = "elastic"
NEAR = 0.1
"""Relative difference from a published figure up to which it counts as matched."""

SHORTER_STEP = 0.005
"""Relative difference of step durations below which they count as equal."""


def number(value: float) -> str:
    """Write a figure with three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) < 0.0005:
        return "<0.001"
    digits = 3 if abs(value) < 0.9995 else 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f}"


def grid_of(table: Table, outcomes: Outcomes) -> Grid:
    """Arrange the outcomes of a matrix."""
    grid: Grid = {}
    for entry in table.entries:
        grid.setdefault(entry.row, {})[entry.column] = outcomes[entry.case]
    return grid


def column_names(table: Table) -> list[str]:
    """Return the columns of a matrix, in ascending order."""
    return sorted({entry.column for entry in table.entries}, key=float)


def on_policies(table: Table, outcomes: Outcomes) -> str:
    """Say who is first, by how much the others stay behind ours, and what the worst of it is."""
    found = {entry.row: outcomes[entry.case] for entry in table.entries}
    ranked = sorted(found, key=lambda row: found[row].mean_act)
    first = found[ranked[0]]
    ours = found[OURS]
    said = [f"Lowest mean ACT: `{ranked[0]}` with {number(first.mean_act)} s, {number(first.over_floor)} × the floor."]
    others = [f"`{row}` {number(found[row].mean_act / ours.mean_act)} ×" for row in ranked if row != OURS]
    said.append(f"`{OURS}` has {number(ours.mean_act)} s; against that, {_listed(others)}.")
    shortest = min(outcome.step_duration for outcome in found.values())
    quick = [f"`{row}`" for row in found if found[row].step_duration <= shortest * (1 + SHORTER_STEP)]
    said.append(f"Shortest step, {number(shortest)} s, to within {SHORTER_STEP:.1%}: {_listed(quick)}.")
    failed = [f"{found[row].failed:,} of {found[row].actions:,} under `{row}`" for row in found if found[row].failed]
    if failed:
        said.append(f"**Not carried out: {_listed(failed)} actions**; their figures do not compare.")
    return " ".join(said)


def on_columns(table: Table, outcomes: Outcomes) -> str:
    """Say, per column of a matrix, which row is first, and over all columns how each compares with ours."""
    grid = grid_of(table, outcomes)
    said = []
    for column in column_names(table):
        here = {row: cells[column] for row, cells in grid.items() if column in cells}
        if OURS in here and len(here) > 1:
            ranked = sorted(here, key=lambda row: here[row].mean_act)
            best = ", ".join(f"`{row}` {number(here[row].mean_act)} s ({number(here[row].over_floor)} × the floor)" for row in ranked[:2])
            said.append(f"* {table.columns} {column}: {best}; `{OURS}` is number {ranked.index(OURS) + 1} of {len(ranked)}.")
    ranges = [_range_against_ours(row, cells, grid[OURS]) for row, cells in grid.items() if row != OURS]
    compared = [each for each in ranges if each]
    if compared:
        said.append(f"* Mean ACT as a multiple of `{OURS}`'s, over all columns: {_listed(compared)}.")
    return "\n".join(said)


def _range_against_ours(row: str, cells: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> str:
    ratios = [cell.mean_act / ours[column].mean_act for column, cell in cells.items() if column in ours]
    if not ratios:
        return ""
    low, high = number(min(ratios)), number(max(ratios))
    return f"`{row}` {low}" if low == high else f"`{row}` {low} to {high}"


def on_saving(table: Table, outcomes: Outcomes) -> str:
    """Say how few of the columns' units each policy needs to be as fast as the static shares, which have the most."""
    grid = grid_of(table, outcomes)
    (static,) = [row for row in grid if row.startswith("static")]
    ((most, target),) = grid[static].items()
    said = []
    for row, cells in grid.items():
        enough = [column for column in cells if cells[column].mean_act <= target.mean_act]
        least = min(enough, key=float, default=None)
        if row == static:
            continue
        if least is None:
            said.append(f"`{row}` with none of the sizes tried")
        else:
            saved = 1 - float(least) / float(most)
            said.append(f"`{row}` with {least} ({saved:.1%} fewer; {number(cells[least].mean_act)} s)")
    target_said = f"`{static}` on {most} {table.columns} has a mean ACT of {number(target.mean_act)} s."
    return f"{target_said} As low or lower, with the fewest {table.columns} tried: {_listed(said)}."


def on_parts(table: Table, outcomes: Outcomes) -> str:
    """Say what switching each part off does to mean ACT."""
    whole, *parts = table.entries
    with_all = outcomes[whole.case].mean_act
    changes = {entry.row: outcomes[entry.case].mean_act / with_all - 1 for entry in parts}
    ranked = sorted(changes, key=lambda row: -changes[row])
    shown = [f"{row} {changes[row]:+.1%}" for row in ranked]
    return f"Mean ACT with all parts: {number(with_all)} s. Change of it, largest first: {_listed(shown)}."


def on_decisions(entries: Iterable[Entry], outcomes: Outcomes) -> str:
    """Say how long ours takes to decide, at worst over the cases shown."""
    ours = [outcomes[entry.case] for entry in entries if entry.case.policy == OURS and not entry.case.without]
    if not ours:
        return ""
    p50, p99 = max(each.decision_us_p50 for each in ours), max(each.decision_us_p99 for each in ours)
    return f"Over the {len(ours)} runs of `{OURS}` here, a decision takes at most {number(p50)} µs at p50 and {number(p99)} µs at p99."


def matched(published: float, found: float) -> str:
    """Say whether a figure is within `NEAR` of the published one, and by how much it is off."""
    off = found / published - 1
    return "matched" if abs(off) <= NEAR else f"not matched ({off:+.0%})"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else "none"
