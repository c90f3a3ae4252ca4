"""What the modules of commands share: the applications that they add to, and how a command prepares itself.

Every process of a stack starts here, so a command imports by itself what it needs: SQLAlchemy alone is a third of a start.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

# typer may contain its own copy of click, so the class of its errors is found through typer.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Schedule the outside resources of agentic RL, action by action.",
)
imports = typer.Typer(no_args_is_help=True, help="Turn recordings of other systems into traces.")
database = typer.Typer(no_args_is_help=True, help="Look after the journal's database.")
tokens = typer.Typer(no_args_is_help=True, help="Make and revoke tokens for the gateway.")
app.add_typer(imports, name="import")
app.add_typer(database, name="db")
app.add_typer(tokens, name="token")

RUN_HELP = "The id of a replay, `last`, or the name of a job; PATH:RUN for one of the SQLite journal at PATH."
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


MOST_NODES: Final = 10_000
MOST_UNITS: Final = 1_000_000
MOST_TILED: Final = 100_000
"""Sizes of a simulation that a machine still holds; the largest that was measured has 100,000 cores (docs/scaling.md)."""
MOST_OVERHEAD_S: Final = 3600


def check_size(*, nodes: int, tile: int | None, **per_node: int | None) -> None:
    """Refuse a cluster or a number of trajectories that would take all memory; `per_node` has units by the option that names them.

    Raises `UsageError`, which names the option and the largest value.
    """
    if nodes > MOST_NODES:
        raise UsageError(f"--nodes {nodes}: at most {MOST_NODES} nodes are simulated")
    for name, units in per_node.items():
        if units is not None and nodes * units > MOST_UNITS:
            option, of_all = name.replace("_", "-"), f" on each of {nodes} nodes" if nodes > 1 else ""
            raise UsageError(f"--{option} {units}{of_all}: at most {MOST_UNITS} in all are simulated")
    if tile is not None and tile > MOST_TILED:
        raise UsageError(f"--tile {tile}: at most {MOST_TILED} trajectories are simulated")


@contextmanager
def importing() -> Iterator[None]:
    """Import what a process that serves needs, without a look for garbage, and never look at these objects again.

    A collection walks all objects that live, and all else waits meanwhile. Those of a thousand modules live as long as the process.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def make_state_dir(state_dir: Path, named_by: str = "TANGRAM_STATE_DIR") -> None:
    """Make the state folder where there is none. Raises `UsageError`."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        problem = f"the state folder {state_dir} cannot be made: {error.strerror}"
        raise UsageError(f"{problem}; set {named_by} to another one") from error


def stop_on_signals() -> threading.Event:
    """Return what is set once a signal asks for the end, or the terminal is closed."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as after `nohup`
            signal.signal(number, lambda *_: stop.set())
    return stop


def log_to_stderr() -> None:
    """Have a process of a deployment log to standard error."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("kombu", "alembic"):
        logging.getLogger(library).setLevel(logging.WARNING)
