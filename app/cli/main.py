"""The command line as a whole, and how it fails: one clear line on standard error, exit 2, no traceback.

The commands are in the modules `looking`, `running`, `replaying`, `planning` and `keeping`. Whatever prints a table also takes `--json`
and then prints one JSON document on standard output and nothing else.
"""

from __future__ import annotations

import difflib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterable
from importlib.metadata import version
from types import FrameType
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError

from app.cli import administration, inspection, planning, replaying, running
from app.cli.common import app
from tangram.errors import TangramError
from tangram.settings import Settings

COMMANDS = (running, inspection, replaying, planning, administration)
"""The modules that have added their commands to `app`."""

ClickException: type[Exception] = typer.BadParameter.__mro__[2]

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

_SETTINGS = {f"TANGRAM_{name}".upper() for name in Settings.model_fields}


def _show_version(asked: bool) -> None:
    if asked:
        print(f"tangram {version('arl-tangram')}")
        raise typer.Exit


@app.callback()
def whole(
    _version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Schedule the outside resources of agentic RL, action by action."""
    for name in sorted(_unknown(os.environ)):
        nearest = difflib.get_close_matches(name, _SETTINGS, 1)
        print(f"tangram: there is no setting {name}{''.join(f'; {one} is one' for one in nearest)}", file=sys.stderr)


def _unknown(names: Iterable[str]) -> set[str]:
    """Return the names that look like settings and are none. Tests have variables of their own, and so have commands."""
    prefixes = ("TANGRAM_TEST_", "TANGRAM_DOP", "TANGRAM_DOCKER_")
    return {name for name in names if name.startswith("TANGRAM_") and not name.startswith(prefixes)} - _SETTINGS


def main() -> NoReturn:
    """Run the command line and exit."""
    interrupts: list[int] = []
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`; in this order each gets its own number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
            os.set_inheritable(getattr(sys, name).fileno(), True)  # else what a child opens gets that number
    if isinstance(sys.stdout, io.TextIOWrapper):  # names have characters that a terminal may not have
        sys.stdout.reconfigure(errors="backslashreplace")

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    def again(ignored: sys.UnraisableHookArgs) -> None:
        if ignored.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(ignored)
        else:  # it came while an object was finalised, where Python drops whatever is raised
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.01)

    sys.unraisablehook = again
    # A command that has started a stack stops it, however it is asked to end. Commands that serve have handlers of their own.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP after `nohup`, and SIGINT in the background of a script
            signal.signal(number, interrupt)
    try:
        code = app(standalone_mode=False, prog_name="tangram")
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
    except MemoryError:
        _fail("there is not enough memory for this")
    except BrokenPipeError:
        _leave(0)
    except TangramError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _fail("the port is taken by another program: choose another one")
        where = f"{error.filename}: " if error.filename else ""
        # Errors of the resolver have numbers of their own, below nought, and say themselves what they mean.
        _fail(f"{where}{os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error}")
    except Exception:
        # Modules that are imported when they are used, as those of numpy and transformers, turn an interrupt into an error of their own.
        if interrupts:
            _fail("interrupted", EXIT_INTERRUPTED)
        raise


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
