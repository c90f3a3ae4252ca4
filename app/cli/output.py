"""What a person sees: tables and progress on a terminal, one JSON document where asked for.

Documents and tables go to standard output, everything said on the way to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from app.cli.consoles import Figures, figures_table, make_console
from app.web.formats import SILENT_S, node_state

if TYPE_CHECKING:
    # They come with SQLAlchemy or the simulator, which most commands and every worker can do without.
    from app.cli.demo import DemoResult
    from app.replay.replay_command import Begin
    from scheduler.sim.trace import Trace

_ACT_COLUMNS = {
    "mean_act": "mean",
    "p50_act": "p50",
    "p95_act": "p95",
    "p99_act": "p99",
    "mean_queue": "queue",
    "mean_background": "back",
    "mean_execution": "exec",
    "mean_overhead": "over",
}
_INSTANCE_COUNTS = {
    "starts": "starts",
    "restores": "restores",
    "evictions": "evictions",
    "leaks": "leaks",
    "wrong_answers": "wrong answers",
}


def note(line: str) -> None:
    """Say something on the way."""
    print(line, file=sys.stderr, flush=True)


def print_json(document: object) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2))


@contextmanager
def progress_bar(title: str) -> Iterator[Begin]:
    """Show a progress bar on standard error where that is a terminal; nothing elsewhere.

    See `app.replay.replay_command.Begin` for what it yields.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def begin(total: int) -> Callable[[], None]:
            task = bar.add_task(title, total=total)
            return lambda: bar.advance(task)

        yield begin


def show_summary(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Show what a replay came to."""
    if as_json:
        print_json(document)
        return
    table = figures_table(f"policy {document['policy']}: ACT and its parts, seconds", ("", "n", *_ACT_COLUMNS.values()))
    groups: list[tuple[str, Mapping[str, Any]]] = [("all", document), *document["by_kind"].items()]
    groups += list(document["by_job"].items()) if len(document["by_job"]) > 1 else []
    for name, group in groups:
        table.add_row(name, str(group["actions"]), *(f"{group[key]:.3f}" for key in _ACT_COLUMNS))
    console = make_console()
    console.print(table)
    console.print(
        f"{document['trajectories']} trajectories, {document['failed']} actions not succeeded, "
        f"floor {document['floor_act']:.3f} s, step {document['step_duration']:.1f} s, "
        f"cores in use {document['cpu_utilisation']:.1%}, cells in use {document['gpu_utilisation']:.1%}, "
        f"{document['resizes']} resizes, {document['restores']} restores, "
        f"{document['decisions']} decisions of {document['decision_us_p50']:.0f} µs (p99 {document['decision_us_p99']:.0f} µs)"
    )
    if "run" in document:
        console.print(f"run {document['run']} in {document['database']}", soft_wrap=True)


def show_comparison(documents: Mapping[str, Mapping[str, Any]], *, as_json: bool) -> None:
    """Show what replays of one trace came to, a column for each policy."""
    if as_json:
        print_json(documents)
        return
    table = figures_table("ACT and its parts, seconds", ("", *documents))
    for key, name in _ACT_COLUMNS.items():
        table.add_row(name, *(f"{document[key]:.3f}" for document in documents.values()))
    table.add_row("floor", *(f"{document['floor_act']:.3f}" for document in documents.values()))
    table.add_row("step", *(f"{document['step_duration']:.1f}" for document in documents.values()))
    for key, name in (("cpu_utilisation", "cores in use"), ("gpu_utilisation", "cells in use")):
        table.add_row(name, *(f"{document[key]:.1%}" for document in documents.values()))
    for key, name in (("actions", "actions"), ("failed", "not succeeded"), ("resizes", "resizes"), ("restores", "restores")):
        table.add_row(name, *(str(document[key]) for document in documents.values()))
    console = make_console()
    console.print(table)
    for policy, document in documents.items():
        if "run" in document:
            console.print(f"{policy}: run {document['run']} in {document['database']}", soft_wrap=True)


def show_demo(result: DemoResult, *, as_json: bool) -> None:
    """Show the demo's comparison."""
    if as_json:
        print_json(result.document)
        return
    console = make_console()
    table = Figures(title="the same recorded rollouts, replayed live under two policies", title_justify="left")
    table.add_column("")
    for policy in result.columns:
        table.add_column(policy, justify="right")
    for name, cells in result.rows:
        table.add_row(name, *cells)
    console.print(result.verdict, soft_wrap=True)
    console.print(table)
    for line in result.where:
        console.print(line, soft_wrap=True)


def show_state(document: Mapping[str, Any], problem: str = "", *, as_json: bool) -> None:
    """Show the state of a deployment; `problem` says why what the scheduler shows could not be read, where that is so."""
    if as_json:
        print_json(document)
        return
    make_console().print(_state(document, problem))


def _state(document: Mapping[str, Any], problem: str = "") -> Group:
    tables = [_state_table(document, problem)]
    if document["services"]:
        tables.append(_services_table(document["services"]))
    if document["set_aside"]:
        tables.append(_set_aside_table(document["set_aside"]))
    return Group(*tables)


def _set_aside_table(messages: Sequence[Mapping[str, Any]]) -> Figures:
    table = Figures(title="set aside: messages on which schedulers failed", title_justify="left")
    for column in ("last failure", "message", "action", "error"):
        table.add_column(column, overflow="fold")
    for one in messages:
        at = datetime.fromtimestamp(one["failed_at"]).astimezone().isoformat(sep=" ", timespec="seconds")
        table.add_row(at, one["kind"], one["action"] or one["message"], one["error"])
    return table


def _services_table(services: Sequence[Mapping[str, Any]]) -> Figures:
    """One line for each instance that is or was somewhere; a service that is nowhere has one, too."""
    caption = f"counts: {'/'.join(_INSTANCE_COUNTS.values())}"
    table = Figures(title="services", title_justify="left", caption=caption, caption_justify="left")
    for column in ("service", "node", "cells", "state"):
        table.add_column(column, overflow="fold")
    for column in ("MiB", "in host", "runs", "counts"):
        table.add_column(column, justify="right")
    reasons = any(instance["reason"] for service in services for instance in service["instances"])
    if reasons:  # without it the table fits into 80 columns
        table.add_column("reason", overflow="fold")
    for service in services:
        name = service["name"] if service["declared"] else f"{service['name']} (declared nowhere)"
        if not service["instances"]:
            table.add_row(name, ", ".join(service["declared"]), "", "absent")
        for found in service["instances"]:
            table.add_row(
                name,
                found["node"],
                ", ".join(map(str, found["cells"])),
                found["state"],
                f"{found['memory_mb']:.0f}",
                f"{found['host_mb']:.0f}",
                str(found["running"]),
                "/".join(str(found[count]) for count in _INSTANCE_COUNTS),
                *([found["reason"]] if reasons else []),
            )
    return table


def _state_table(document: Mapping[str, Any], problem: str) -> Figures:
    table = Figures(title=problem or _scheduler_line(document["scheduler"]), title_justify="left")
    for column in ("node", "state", "pools", "cores", "cells", "isolation", "memory", "runs", "envs"):
        table.add_column(column, overflow="fold", no_wrap=column in ("cores", "cells", "runs", "envs"))
    shards = any(node["shard"] for node in document["nodes"])
    if shards:
        table.add_column("shard")
    reasons = any(node["reason"] for node in document["nodes"])
    if reasons:  # without it the table fits into 80 columns
        table.add_column("reason", overflow="fold")
    for node in document["nodes"]:
        offers = node["description"]
        labels = offers.get("labels", ())
        table.add_row(
            node["name"],
            node_state(node),
            ", ".join(offers.get("kinds", ())),
            str(offers.get("cores", "")),
            str(offers.get("cells", "")),
            *(_label(labels, kind) for kind in ("isolation:", "memory:")),
            str(node["running"]),
            str(node["environments"]),
            *([str(node["shard"])] if shards else []),
            *([node["reason"]] if reasons else []),
        )
    actions = ", ".join(f"{count} {state}" for state, count in document["actions"].items()) or "none yet"
    table.caption = f"actions: {actions}; the longest wait is {document['oldest_wait_s']:.1f} s"
    if failed := document["infra_failed"]:
        table.caption += f"\nfailures of ours: {', '.join(f'{count} {cause}' for cause, count in failed.items())}"
    for job, held in (document["scheduler"] or {}).get("held_back", {}).items():
        table.caption += f"\njob {job} is held back: {held['ours']} of {held['ended']} actions failed by our fault; {held['waiting']} wait"
    table.caption_justify = "left"
    return table


def _label(labels: Sequence[str], kind: str) -> str:
    """Return what the labels of a kind say, in words."""
    return ", ".join(label.removeprefix(kind).replace("-", " ") for label in labels if label.startswith(kind))


def _scheduler_line(scheduler: Mapping[str, Any] | None) -> str:
    if scheduler is None:
        return "no scheduler is active"
    silent_s = scheduler.get("shown_ago_s", 0.0)
    silent = f"\nthe scheduler of shard {scheduler['shard']} does not show itself" if "shard" in scheduler and silent_s > SILENT_S else ""
    return (
        f"scheduler: {scheduler['policy']}, epoch {scheduler['epoch']}, {scheduler['waiting']} waiting, "
        f"{scheduler['running']} running, {scheduler['decisions']} decisions, p99 {scheduler['decision_us_p99']:.0f} µs{silent}"
    )


def show_report(document: Mapping[str, Any], *, as_json: bool) -> None:
    """Show the figures of a run or a job from the journal."""
    if as_json:
        print_json(document)
        return
    run = document.get("run")
    title = f"run {run['id']}: {run['policy']} on {run['trace']}" if run else f"job {document['job']}"
    table = Figures(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    # Names give way to figures where the terminal is narrow.
    table.add_column("seconds", overflow="fold")
    for column in ("n", "bad", "ours", "program", "ACT", "p95", "queue", "back", "over", "exec", "CPU"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, stats in [("all", document["total"]), *document["by_kind"].items(), *document["by_job"].items()]:
        table.add_row(name, *_stats_cells(stats))
    console = make_console()
    console.print(table)
    console.print(
        "bad: ended otherwise than succeeded; ours: by a fault of the infrastructure; program: by the program's, which includes commands "
        "that exited non-zero; ACT: mean, = queue + back(ground) + over(head) + exec(ution); CPU: core-seconds used",
        soft_wrap=True,
    )
    console.print(
        f"core-seconds reserved: {document['total']['core_s_reserved']:.1f} by grants, {document['pod_core_s']:.1f} by pods; "
        f"used: {document['total']['core_s_used']:.1f}"
    )
    if "comparison" in document:
        console.print(_comparison(document))


def _comparison(document: Mapping[str, Any]) -> Figures:
    from app.report.comparison import comparison_table

    names = tuple(f"{one['run']['policy']} ({one['run']['id']})" if "run" in one else one["job"] for one in (document, document["against"]))
    compared = comparison_table(document["comparison"], (names[0], names[1]))
    table = Figures(title="compared", title_justify="left", box=box.SIMPLE)
    for place, column in enumerate(compared.columns):
        table.add_column(column, justify="left" if place < compared.words else "right")
    for row in compared.rows:
        table.add_row(*row)
    return table


def _stats_cells(stats: Mapping[str, Any]) -> Sequence[str]:
    from scheduler.model.lifecycle import ACTION

    by_status: Mapping[str, int] = stats["by_status"]
    act = stats["act"]
    means = ("mean_queue_s", "mean_background_s", "mean_overhead_s", "mean_execution_s")
    figures = (act["mean"], act["p95"], *(stats[mean] for mean in means))
    by_fault: Mapping[str, int] = stats["by_fault"]
    bad = sum(count for status, count in by_status.items() if status in ACTION.ends and status != "succeeded")
    counts = (sum(by_status.values()), bad, by_fault.get("infrastructure", 0), by_fault.get("program", 0))
    return (*map(str, counts), *map(_figure, figures), f"{stats['core_s_used']:.1f}")


def _figure(value: float) -> str:
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


def write_out(trace: Trace, path: Path | None) -> None:
    """Write a trace to a file, or to standard output."""
    from app.replay.traces import write_trace

    if path is None:
        write_trace(trace, sys.stdout)
        return
    with path.open("w", encoding="utf-8") as stream:
        write_trace(trace, stream)
    note(f"wrote {len(trace.trajectories)} trajectories to {path}")
