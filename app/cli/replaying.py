"""The commands that make, convert and replay traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli import output
from app.cli.common import MOST_OVERHEAD_S, RUN_HELP, AsJson, UsageError, app, check_size, imports, make_state_dir
from tangram.errors import InvalidAction
from tangram.settings import Settings

if TYPE_CHECKING:
    from app.replay.replay_command import ReplayOptions
    from scheduler.sim.trace import Trace


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace, tangram.trace/1, as JSON Lines.")],
    simulate: Annotated[bool, typer.Option("--simulate", help="In virtual time.")] = False,
    live: Annotated[bool, typer.Option("--live", help="On a running stack, or on one that is started for it.")] = False,
    policy: Annotated[str | None, typer.Option(help="elastic, paper, fcfs, fixed:N or static:N; elastic by default.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="CPU nodes.")] = 1,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores per node; by default those of this machine.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs per node; by default the cells of all services.")] = None,
    memory_mb: Annotated[int | None, typer.Option(min=1, help="Memory per node, MB; by default without limit in simulation.")] = None,
    gpu_memory_mb: Annotated[int, typer.Option(min=1, help="Memory per GPU, MB.")] = 80_000,
    seed: Annotated[int, typer.Option(help="Seed of the arrivals that --tile draws.")] = 0,
    speed: Annotated[float, typer.Option(help="Think times are divided by this.")] = 1.0,
    tile: Annotated[int | None, typer.Option(min=1, help="Repeat the trajectories, in order, to this number.")] = None,
    spread: Annotated[float, typer.Option(help="Seconds over which --tile spreads the arrivals.")] = 60.0,
    label: Annotated[list[str] | None, typer.Option(help="A label that every node has; may be repeated.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="A part of `elastic` to go without; may be repeated.")] = None,
    history: Annotated[str | None, typer.Option(help="A run of the journal that `elastic` has learned from; with --simulate.")] = None,
    overhead: Annotated[float, typer.Option(help="Seconds that each action takes besides queueing and running; with --simulate.")] = 0.0,
    compare: Annotated[str | None, typer.Option(help="Policies, as in elastic,static:1: one after the other, side by side.")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay recorded rollouts."""
    from app.replay.replay_command import ReplayOptions
    from app.replay.traces import read_trace
    from scheduler.policies import make_policy

    if simulate == live:
        raise UsageError("say either --simulate or --live")
    if not 0 < speed < float("inf"):
        raise InvalidAction("--speed", f"must be above 0, not {speed}")
    if not 0 <= spread < float("inf"):
        raise InvalidAction("--spread", f"must be 0 or more, not {spread}")
    check_size(nodes=nodes, tile=tile, cores=cores, gpus=gpus)
    policies = _policies(policy, compare)
    if without and compare is not None and "elastic" not in policies:
        raise InvalidAction("--without", f"counts for elastic, and {compare} is compared")
    for name in policies:
        make_policy(name, without=(without or ()) if name == "elastic" or compare is None else ())
    if history is not None and not simulate:
        raise UsageError("--history is for --simulate: a live scheduler learns from its own journal (TANGRAM_HISTORY)")
    if not 0 <= overhead <= MOST_OVERHEAD_S or (overhead and not simulate):
        raise InvalidAction("--overhead", f"must be 0 or more, at most {MOST_OVERHEAD_S}, and with --simulate, not {overhead}")
    options = ReplayOptions(
        overhead_s=overhead,
        nodes=nodes,
        cores=cores,
        gpus=gpus,
        memory_mb=memory_mb,
        gpu_memory_mb=gpu_memory_mb,
        seed=seed,
        speed=speed,
        tile=tile,
        spread_s=spread,
        labels=tuple(label or ()),
    )
    parts = tuple(without or ())
    each = [replace(options, policy=name, without=parts if name == "elastic" else ()) for name in policies]
    read = read_trace(trace)
    documents = _simulated(read, each, history) if simulate else _lived(read, trace, each, apart=compare is not None)
    if compare is None:
        output.show_summary(documents[0], as_json=as_json)
    else:
        output.show_comparison({name: document for name, document in zip(policies, documents, strict=True)}, as_json=as_json)


def _policies(policy: str | None, compare: str | None) -> list[str]:
    if compare is None:
        return [policy or "elastic"]
    if policy is not None:
        raise UsageError("--compare names the policies: leave --policy out")
    names = [name.strip() for name in compare.split(",")]
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        raise UsageError(f"--compare takes two policies or more, each once, as in elastic,static:1, not {compare!r}")
    return names


def _simulated(trace: Trace, each: Sequence[ReplayOptions], history: str | None) -> list[dict[str, Any]]:
    """Replay in virtual time, one after the other."""
    from app.cli.state import read_history
    from app.replay.replay_command import simulate
    from scheduler.sim.summary import summarise

    learned = read_history(Settings(), history) if history is not None else ()
    return [summarise(simulate(trace, options, learned)) for options in each]


def _lived(trace: Trace, path: Path, each: Sequence[ReplayOptions], *, apart: bool) -> list[dict[str, Any]]:
    """Replay live, one after the other; `apart` on a stack of each one's own, since one that runs has its own policy."""
    from app.replay.replay_command import alone, replay_live

    documents = []
    for options in each:
        settings = Settings()
        if apart:
            settings = alone(settings, settings.state_dir / "compare" / options.policy.replace(":", "-"))
        if settings.broker_url is None:
            make_state_dir(settings.state_dir)
        with output.progress_bar(options.policy) as begin:
            documents.append(replay_live(trace, path, options, settings, begin, output.note).document)
    return documents


@app.command()
def demo(
    state_dir: Annotated[Path, typer.Option(help="Folder for the demo's models, SQLite files, logs and report.")] = Path(".tangram/demo"),
    speed: Annotated[float, typer.Option(help="Think times are divided by this.")] = 4.0,
    once: Annotated[bool, typer.Option("--once", help="Run one pair, however busy other programs keep the machine.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two policies live.

    The bundled rollouts are replayed under static:1 and under elastic.
    """
    from app.cli.demo import run_demo

    if not 0 < speed < float("inf"):
        raise InvalidAction("--speed", f"must be above 0, not {speed}")
    make_state_dir(state_dir, "--state-dir")
    result = run_demo(state_dir, speed, output.progress_bar, output.note, once=once)
    output.show_demo(result, as_json=as_json)


@app.command()
def record(
    scripts: Annotated[list[Path], typer.Argument(help="Scripted rollouts, TOML.")],
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the trace; standard output by default.")] = None,
) -> None:
    """Run scripted rollouts and write a trace.

    The trace says how long everything took, live.
    """
    from app.replay.record_command import record_live
    from app.replay.scripts import read_script

    read = [read_script(path) for path in scripts]
    relative_to = out.parent if out is not None else Path.cwd()
    if out is not None:
        out.open("a", encoding="utf-8").close()  # a place that cannot be written is said before the work, not after
    with output.progress_bar("record") as begin:
        trace = record_live(read, Settings(), relative_to, begin, output.note)
    output.write_out(trace, out)


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)],
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the trace; standard output by default.")] = None,
) -> None:
    """Turn a live run or a job into a trace.

    The trace replays. It has no commands, since the journal keeps none.
    """
    from app.cli.run_selection import chosen
    from app.journal.history import declarations
    from app.replay.export import export as make_trace
    from app.services_file import load_services_file

    settings = Settings()
    declared = load_services_file(settings.services_file).quota_specs() if settings.services_file is not None else ()
    with chosen(settings, run) as found:
        exported = make_trace(declarations(found.engine, found.selection), {quota.name: quota for quota in declared})
    for line in exported.notes:
        output.note(line)
    output.write_out(exported.trace, out)


@imports.command("swe-agent")
def import_swe_agent(
    files: Annotated[list[Path], typer.Argument(help="SWE-agent trajectories, *.traj.")],
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the trace; standard output by default.")] = None,
) -> None:
    """Turn SWE-agent trajectories into a trace."""
    from app.replay.importers.swe_agent import import_swe_agent as read_all

    output.write_out(read_all(files), out)


@imports.command("spans")
def import_spans(
    files: Annotated[list[Path], typer.Argument(help="OpenTelemetry spans: OTLP as JSON or JSON Lines, or lists of spans.")],
    trajectory: Annotated[str | None, typer.Option(help="The attribute that tells trajectories apart; by default the trace id.")] = None,
    rules: Annotated[Path | None, typer.Option(help="What tool calls become, TOML; by default each is a command on one core.")] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the trace; standard output by default.")] = None,
) -> None:
    """Turn OpenTelemetry spans of tool calls into a trace."""
    from app.replay.importers.spans import import_spans as read_all
    from app.replay.importers.spans import read_rules

    read = read_rules(rules) if rules is not None else None
    output.write_out(read_all(files, trajectory=trajectory, rules=read), out)
