"""How a plan and a calibration are shown to a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from app.cli.consoles import Figures, figures_table, make_console
from app.cli.output import print_json
from app.web.formats import counted

if TYPE_CHECKING:
    from app.planning.cases import Case


MOST_OTHERS = 0.1
"""The part of the cores that other programs may take before a calibration says little."""


@contextmanager
def simulating() -> Iterator[Callable[[Case, int], None]]:
    """Show a line on standard error where that is a terminal; nothing elsewhere.

    Yields a function to call after each simulation, with its case and the number of simulations so far.
    """
    with Console(stderr=True).status("simulating …") as status:

        def progress(case: Case, count: int) -> None:
            size = f"{counted(case.cores, 'core')}, {counted(case.gpus, 'GPU')}"
            status.update(escape(f"{count} simulated; last: {case.options.policy}, {size}"))

        yield progress


def show_plan(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Show the answer, its curve, and what other loads make of it."""
    if as_json:
        print_json(document)
        return
    console = make_console()
    console.print(_headline(document), soft_wrap=True)
    for line in _answer_lines(document):
        console.print(f"  {line}", soft_wrap=True)
    if document["curve"]:
        console.print(_curve_table(document))
    if document["sensitivity"]:
        console.print(_sensitivity_table(document))
    console.print(
        f"{document['simulations']} simulations, {document['cpu_s']:.0f} s of CPU time, {document['wall_s']:.0f} s in all", soft_wrap=True
    )


def _headline(document: Mapping[str, Any]) -> str:
    nodes = f" as {document['nodes']} nodes of {document['cores_per_node']}" if document["nodes"] > 1 else ""
    gpus = f", {counted(document['gpus'], 'GPU')}" if document["gpus"] else ""
    memory = f", {document['memory_mb']} MB of memory" if document["memory_mb"] is not None else ""
    rollouts = counted(document["trajectories"], "trajectory", "trajectories")
    return f"{counted(document['cores'], 'core')}{nodes}{gpus}{memory} for {rollouts} under {document['policy']}"


def _answer_lines(document: Mapping[str, Any]) -> list[str]:
    target = document["target"]
    limits = [
        f"{name} at most {target[key]:.4g} s, reached {document[key]:.4g} s"
        for key, name in (("mean_act", "mean ACT"), ("step_duration", "step duration"))
        if key in target
    ]
    compared = f" ({target['no_worse_than']} on {target['than_cores']} cores)" if "no_worse_than" in target else ""
    seeds = [each["seed"] for each in document["by_seed"]]
    lines = [f"target{compared}: {'; '.join(limits)}"]
    lines += [f"limited by {document['limited_by'].replace('_', ' ')}; floor of mean ACT {document['floor_act']:.4g} s"]
    if len(seeds) > 1:
        lines.append(f"met at each of the seeds {', '.join(map(str, seeds))}; the figures are those of {document['seed']}, the tightest")
    if document["memory_mb"] is None:
        lines.append("memory unknown: the trace says of no trajectory what it needs")
    elif document["memory_mb"] < document["memory_mb_by_limit"]:
        lines.append(f"memory by action; the limits of the environments add up to {document['memory_mb_by_limit']} MB")
    for name, quota in document["quotas"].items():
        lines.append(f"quota {name}: {quota['suffices_per_s']:.3g} requests/s of the declared {quota['declared_per_s']:g} suffice")
    if document["cost"] is not None:
        lines.append(f"cost {document['cost']['per_hour']:.4g} an hour, {document['cost']['per_step']:.4g} a step")
    if not document["monotone"]:
        lines.append("more cores did not always do better: a size beyond one that meets the target was seen to miss it")
    lines.append(_error_line(document["calibration"]))
    return lines


def _error_line(calibration: Mapping[str, Any] | None) -> str:
    if calibration is None:
        return "the simulator's error on this machine is not known: tangram plan --calibrate measures it"
    errors = [
        f"{policy} mean ACT {of['error']['mean_act']:+.1%}, step {of['error']['step_duration']:+.1%}"
        for policy, of in calibration["policies"].items()
    ]
    at = datetime.fromtimestamp(calibration["at"]).astimezone().isoformat(sep=" ", timespec="minutes")
    busy = ", while other programs ran" if calibration["others_cores"] > MOST_OTHERS * calibration["cores"] else ""
    return f"the simulator's error on this machine ({at}{busy}): {'; '.join(errors)}"


def _curve_table(document: Mapping[str, Any]) -> Figures:
    table = figures_table("by cores", ("cores", "mean ACT s", "p95 s", "step s", "of target", ""), first="right")
    for point in document["curve"]:
        notes = ["answer"] if point["cores"] == document["cores"] else []
        notes += ["knee"] if point["cores"] == document["knee_cores"] else []
        of_target = "never" if point["of_target"] is None else f"{point['of_target']:.3%}"
        table.add_row(str(point["cores"]), *_seconds(point), of_target, ", ".join(notes))
    return table


def _sensitivity_table(document: Mapping[str, Any]) -> Figures:
    columns = ("change", "mean ACT s", "p95 s", "step s", "ACT target")
    table = figures_table(f"the same {document['cores']} cores under another load", columns, first="right")
    words = {True: "met", False: "missed", None: "none"}
    for found in document["sensitivity"]:
        table.add_row(found["change"], *_seconds(found), words[found["meets_act"]])
    return table


def _seconds(figures: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{figures['mean_act']:.3f}", f"{figures['p95_act']:.3f}", f"{figures['step_duration']:.1f}"


def _others_line(document: Mapping[str, Any]) -> str:
    others = document["others_cores"]
    doubt = ": the error is theirs as much as the simulator's" if others > MOST_OTHERS * document["cores"] else ""
    return f"other programs kept {max(0.0, others):.1f} of the {document['cores']} cores busy meanwhile{doubt}"


def show_calibration(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Show how far simulations are from live runs."""
    if as_json:
        print_json(document)
        return
    columns = ("policy", "figure", "live s", "simulated s", "error", "with overhead")
    table = figures_table("live runs of the bundled rollouts, and their simulation", columns, first="right")
    for policy, found in document["policies"].items():
        for key, error in found["error"].items():
            figures = (
                f"{found['live'][key]:.3f}",
                f"{found['simulated'][key]:.3f}",
                f"{error:+.1%}",
                f"{found['with_overhead'][key]:+.1%}",
            )
            table.add_row(policy, key.replace("_", " "), *figures)
    console = make_console()
    console.print(table)
    overheads = ", ".join(f"{found['overhead_s']:.3f} s under {policy}" for policy, found in document["policies"].items())
    console.print(f"an action's overhead live, which --overhead counts in simulations: {overheads}", soft_wrap=True)
    console.print(_others_line(document), soft_wrap=True)
    console.print(f"written to {document['file']}", soft_wrap=True)
