"""The commands, and how they fail: one clear line on standard error, exit 2, no traceback.

Whatever prints a table also takes `--json` and then prints one JSON document on standard output and nothing else.
Every process of a stack starts here, so a command imports by itself what it needs: SQLAlchemy alone is a third of a start.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from pydantic import ValidationError

from app.cli import output
from tangram.errors import InvalidAction, TangramError
from tangram.settings import Settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

# typer may bring a click of its own, so the classes of its errors are found by way of the one that it names.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]
ClickException: type[Exception] = typer.BadParameter.__mro__[2]

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Schedule the outside resources of agentic RL, action by action.",
)
imports = typer.Typer(no_args_is_help=True, help="Turn recordings of other systems into traces.")
database = typer.Typer(no_args_is_help=True, help="Look after the journal's database.")
tokens = typer.Typer(no_args_is_help=True, help="Make and revoke tokens for callers of the gateway.")
app.add_typer(imports, name="import")
app.add_typer(database, name="db")
app.add_typer(tokens, name="token")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        if code == EXIT_INTERRUPTED:
            _fail("interrupted", EXIT_INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)
    except typer.Abort:
        _fail("interrupted", EXIT_INTERRUPTED)
    except ClickException as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message, file=sys.stderr)
            _leave(EXIT_BAD_INPUT)
        _fail(message)
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED)
    except ValidationError as error:
        _fail("; ".join(": ".join([f"TANGRAM_{e['loc'][0]}".upper(), *map(str, e["loc"][1:]), e["msg"]]) for e in error.errors()))
    except BrokenPipeError:
        _leave(0)
    except TangramError as error:
        _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{os.strerror(error.errno) if error.errno else error}")


def _fail(line: str, code: int = EXIT_BAD_INPUT) -> NoReturn:
    print(f"tangram: {' '.join(line.split())}", file=sys.stderr)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit without Python's own complaint about a standard output that is full or closed."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.ENOSPC and code == 0:
            code = EXIT_BAD_INPUT
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace, tangram.trace/1, as JSON Lines.")],
    simulate: Annotated[bool, typer.Option("--simulate", help="In virtual time.")] = False,
    live: Annotated[bool, typer.Option("--live", help="On a running stack, or on one that is started for it.")] = False,
    policy: Annotated[str, typer.Option(help="elastic, paper, fcfs, fixed:N or static:N.")] = "elastic",
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
    as_json: AsJson = False,
) -> None:
    """Replay recorded rollouts."""
    from app.replay.replay_command import ReplayOptions, replay_live
    from app.replay.replay_command import simulate as in_virtual_time
    from app.replay.traces import read_trace
    from scheduler.policies import make_policy
    from scheduler.sim.summary import summarise

    if simulate == live:
        raise UsageError("say either --simulate or --live")
    if not 0 < speed < float("inf"):
        raise InvalidAction("--speed", f"must be above 0, not {speed}")
    if not 0 <= spread < float("inf"):
        raise InvalidAction("--spread", f"must be 0 or more, not {spread}")
    make_policy(policy, without=without or ())
    if history is not None and not simulate:
        raise UsageError("--history is for --simulate: a live scheduler learns from its own journal (TANGRAM_HISTORY)")
    options = ReplayOptions(
        policy=policy,
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
        without=tuple(without or ()),
    )
    read = read_trace(trace)
    if simulate:
        from app.cli.state import read_history

        learned = read_history(Settings(), history) if history is not None else ()
        output.show_summary(summarise(in_virtual_time(read, options, learned)), as_json=as_json)
        return
    with output.Progress(policy) as progress:
        result = replay_live(read, trace, options, Settings(), progress.begin, output.note)
    output.show_summary(result.document, as_json=as_json)


@app.command()
def demo(
    state_dir: Annotated[Path, typer.Option(help="Folder for the demo's models, SQLite files, logs and report.")] = Path(".tangram/demo"),
    speed: Annotated[float, typer.Option(help="Think times are divided by this.")] = 4.0,
    as_json: AsJson = False,
) -> None:
    """Replay the bundled rollouts live, under static:1 and under elastic, and compare."""
    from app.cli.demo import run_demo

    if not 0 < speed < float("inf"):
        raise InvalidAction("--speed", f"must be above 0, not {speed}")
    result = run_demo(state_dir, speed, output.Progress, output.note)
    output.show_demo(result, as_json=as_json)


@app.command()
def up(
    policy: Annotated[str | None, typer.Option(help="elastic, paper, fcfs, fixed:N or static:N; by default TANGRAM_POLICY.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="CPU nodes.")] = 1,
    cores: Annotated[int | None, typer.Option(min=1, help="Cores per node; by default those of this machine.")] = None,
    cells: Annotated[int, typer.Option(min=1, help="GPU cells of the GPU node.")] = 2,
) -> None:
    """Run the embedded stack in the state folder, until Ctrl-C; a process of it that ends is started again."""
    from app.cli.demo import tiny_services
    from app.local import stack
    from scheduler.policies import make_policy

    settings = Settings()
    policy = policy or settings.policy
    make_policy(policy)
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    services_file = settings.services_file or tiny_services(settings.state_dir, output.note)
    plan = stack.StackPlan(
        policy=policy,
        nodes=nodes,
        cores=cores,
        cells=cells if services_file else 0,
        services_file=services_file,
        gateway_port=settings.gateway_port,
    )
    stop = _stop_on_signals()
    with stack.start(plan, settings.state_dir) as started:
        stack.wait_until_up(started, plan)
        output.note(f"the stack is up in {started.state_dir}: {', '.join(plan.node_names())}; Ctrl-C ends it")
        if plan.gateway_port is not None:
            output.note(f"the gateway is at {plan.gateway_url}; `tangram token new --job J` makes a token")
        started.supervise(stop, output.note)


@app.command()
def scheduler() -> None:
    """Run a scheduler; further ones stand by."""
    from app.scheduler_process import run

    _log_to_stderr()
    run(Settings(), _stop_on_signals())


@app.command()
def worker(
    pool: Annotated[str, typer.Argument(help="cpu, gpu or api.")],
    include: Annotated[list[str] | None, typer.Option(help="A further module with Celery tasks; may be repeated.")] = None,
    log_level: Annotated[str, typer.Option(help="Celery's log level.")] = "WARNING",
) -> None:
    """Run the worker of a node."""
    import importlib

    if pool not in ("cpu", "gpu", "api"):
        raise UsageError(f"worker {pool!r} is none of cpu, gpu, api")
    importlib.import_module("workers.start").run(pool, Settings(), tuple(include or ()), log_level)


@app.command()
def gateway(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0 for any, which the log names.")] = 8089,
) -> None:
    """Serve clients of other systems over HTTP; any number of processes may do so."""
    import importlib

    from app.cli.state import database_of

    _log_to_stderr()
    try:
        server = importlib.import_module("app.gateway.server")
    except ModuleNotFoundError as error:
        raise TangramError(f"the gateway needs {error.name}: install the extra `gateway`") from error
    settings = Settings()
    server.serve(settings, database_of(settings), host, port)


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show nodes, environments and actions as they are now."""
    from app.cli.state import read_state

    output.show_state(read_state(Settings()), as_json=as_json)


@app.command()
def health(part: Annotated[str, typer.Argument(help="scheduler, cpu, gpu or api.")]) -> None:
    """Say whether this host's process of a deployment does its work; for health checks."""
    from app.cli.health import PARTS, check_health

    found = next((known for known in PARTS if known == part), None)
    if found is None:
        raise UsageError(f"{part!r} is none of {', '.join(PARTS)}")
    print(check_health(found, Settings()))


@app.command()
def top(interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0) -> None:
    """Keep showing what `status` shows, until Ctrl-C."""
    from app.cli.state import read_state

    settings = Settings()
    output.keep_showing(lambda: read_state(settings), interval, _stop_on_signals())


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="The id of a replay, `last`, or the name of a job.")] = "last",
    as_json: AsJson = False,
) -> None:
    """Show the ACT figures of a replay or of a job from the journal."""
    from app.cli.state import read_report

    output.show_report(read_report(Settings(), run), as_json=as_json)


@app.command()
def record(
    scripts: Annotated[list[Path], typer.Argument(help="Scripted rollouts, TOML.")],
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the trace; standard output by default.")] = None,
) -> None:
    """Run scripted rollouts live and write down how long everything took."""
    from app.replay.record_command import record_live
    from app.replay.scripts import read_script

    read = [read_script(path) for path in scripts]
    relative_to = out.parent if out is not None else Path.cwd()
    if out is not None:
        out.open("a", encoding="utf-8").close()  # a place that cannot be written is said before the work, not after
    with output.Progress("record") as progress:
        trace = record_live(read, Settings(), relative_to, progress.begin, output.note)
    output.write_out(trace, out)


@imports.command("swe-agent")
def import_swe_agent(
    files: Annotated[list[Path], typer.Argument(help="SWE-agent trajectories, *.traj.")],
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the trace; standard output by default.")] = None,
) -> None:
    """Turn SWE-agent trajectories into a trace."""
    from app.replay.importers.swe_agent import import_swe_agent as read_all

    output.write_out(read_all(files), out)


@database.command("upgrade")
def db_upgrade() -> None:
    """Bring the journal's tables up to date."""
    from app.journal.database import sqlite_url, upgrade

    settings = Settings()
    if settings.database_url is None:
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    upgrade(settings.database_url or sqlite_url(settings.state_dir / "tangram.sqlite"))


@tokens.command("new")
def token_new(job: Annotated[str, typer.Option(help="The job that callers with this token act for.")]) -> None:
    """Make a token and print it; it is shown this once."""
    from app.gateway.tokens import make_token

    print(make_token(_journal(), job))


@tokens.command("revoke")
def token_revoke(job: Annotated[str, typer.Option(help="The job whose tokens no longer count.")]) -> None:
    """Revoke all tokens of a job and print how many there were; gateways notice within seconds."""
    from app.gateway.tokens import revoke_tokens

    print(revoke_tokens(_journal(), job))


def _journal() -> Engine:
    """Return the journal's database, which must be up to date."""
    from app.cli.state import database_of
    from app.journal.database import open_engine, require_latest

    settings = Settings()
    engine = open_engine(database_of(settings), connect_timeout_s=settings.connect_timeout_s)
    require_latest(engine)
    return engine


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("kombu", "alembic"):
        logging.getLogger(library).setLevel(logging.WARNING)
