"""The commands that show what is, and what was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from app.cli import output
from app.cli.common import RUN_HELP, AsJson, UsageError, app, stop_on_signals
from tangram.errors import StackUnreachable
from tangram.settings import Settings

NOBODY_ANSWERS = 3


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show nodes, environments and actions as they are now.

    The exit code is 3 where no scheduler answers.
    """
    from app.cli.state import read_state

    try:
        document, problem = read_state(Settings())
    except StackUnreachable as error:
        output.note(f"tangram: {error}")
        raise typer.Exit(NOBODY_ANSWERS) from error
    output.show_state(document, problem, as_json=as_json)
    if document["scheduler"] is None:
        raise typer.Exit(NOBODY_ANSWERS)


@app.command()
def top(interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0) -> None:
    """Show the live page in this terminal.

    It is the first page of `tangram web`, until Ctrl-C; shown once where the output is no terminal.
    """
    from app.cli.state import Overviews
    from app.cli.top import keep_showing

    if math.isnan(interval):  # which is neither below the least nor above the most
        raise typer.BadParameter("nan is no number of seconds", param_hint="--interval")

    keep_showing(Overviews(Settings()).read, interval, stop_on_signals())


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help=RUN_HELP)] = "last",
    against: Annotated[str | None, typer.Option(help="A second RUN, that the first one is compared with.")] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", help="Write a page with pictures to this file, HTML.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the ACT figures of a replay or a job.

    They come from the journal, as a table or as a page with pictures.
    """
    from app.cli.reporting import read_report, write_page

    if as_json and str(out) == "-":
        raise UsageError("-o - and --json would both write to standard output")
    found = read_report(Settings(), run, against)
    if out is not None:
        output.note(write_page(found, out))
    if out is None or as_json:
        output.show_report(found.document(), as_json=as_json)


@app.command()
def envs(
    job: Annotated[str | None, typer.Option(help="Only those of this job.")] = None,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Only those whose client is silent, or whose job has had no action for long.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the environments that have not ended.

    It says whose they are, how old, what runs in them, and when their lease is over.
    """
    from app.cli.environments import read_environments, show_environments

    show_environments(read_environments(Settings(), job=job, orphans=orphans), as_json=as_json)
