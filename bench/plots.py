"""Plots of the benchmark, as SVG files. Only drawing lives here: what is shown comes in as points and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tangram", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})

from matplotlib import pyplot  # noqa: E402  (the backend must be chosen first)

Points = Sequence[tuple[float, float]]

COLOURS = {
    "elastic": "#d62728",
    "paper": "#1f77b4",
    "fcfs": "#2ca02c",
    "static:1": "#7f7f7f",
    "static:4": "#000000",
    "fixed:1": "#c5b0d5",
    "fixed:2": "#ff9896",
    "fixed:4": "#ff7f0e",
    "fixed:8": "#8c564b",
    "fixed:16": "#9467bd",
}
"""Policies look the same in every plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What a plot says around its lines. `log` names the axes with a logarithmic scale: "", "x", "y" or "xy"."""

    title: str
    x: str
    y: str
    log: str = ""


def lines(series: Mapping[str, Points], axes: Axes, path: Path, *, marker: str = "") -> None:
    """Draw one line per name."""
    figure, panel = pyplot.subplots(figsize=(7.0, 4.0), layout="constrained")
    for name, points in series.items():
        xs, ys = [x for x, _ in points], [y for _, y in points]
        wide, style = (2.0 if name == "elastic" else 1.2), ("--" if name.startswith("static") else "-")
        panel.plot(xs, ys, label=name, color=COLOURS.get(name), linewidth=wide, linestyle=style, marker=marker, markersize=4)
    panel.set(title=axes.title, xlabel=axes.x, ylabel=axes.y)
    if "x" in axes.log:
        panel.set_xscale("log")
    if "y" in axes.log:
        panel.set_yscale("log")
    panel.legend(fontsize=8)
    _save(path)
    pyplot.close(figure)


def bars(values: Mapping[str, float], axes: Axes, path: Path, *, line: float) -> None:
    """Draw one horizontal bar per name, and a vertical line to compare with."""
    figure, panel = pyplot.subplots(figsize=(7.0, 0.8 + 0.4 * len(values)), layout="constrained")
    drawn = panel.barh(list(values), list(values.values()), color=[COLOURS["elastic"], *["#9ecae1"] * (len(values) - 1)])
    panel.bar_label(drawn, fmt="%.3f", padding=3)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.axvline(line, color="black", linewidth=0.8, linestyle="--")
    panel.set(title=axes.title, xlabel=axes.x, ylabel=axes.y)
    _save(path)
    pyplot.close(figure)


def _save(path: Path) -> None:
    """Write the current figure, without the date that would make every run another file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyplot.savefig(path, metadata={"Date": None})
