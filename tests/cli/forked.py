"""The command line in a fork of the process of the tests, which has imported it all: a tenth of the time of a fresh process.

For commands that make no Celery application, or that are refused before they use it: that starts threads, which a fork does not have.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import typer

# The command line imports these when it needs them.
import app.cli.demo
import app.cli.state
import app.local.stack
import app.replay.importers.swe_agent
import app.replay.record_command
import app.replay.replay_command  # noqa: F401
import scheduler.policies  # noqa: F401
from app.cli import main as command_line
from app.cli.common import app as commands

ROOT = Path(__file__).resolve().parents[2]
READ = typer.main.get_command(commands)
"""The commands with their options, which take most of the time of a command that is refused."""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a command with its state in a folder, and the services whose file is there."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TANGRAM_")}
    if (folder / "services.toml").exists():
        env["TANGRAM_SERVICES_FILE"] = str(folder / "services.toml")
    return {**env, "TANGRAM_STATE_DIR": str(folder / "state"), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}


def forked(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with its state in the folder `cwd`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            code = 70
            gc.freeze()  # else a collection may look at all that the tests have, and so copy it
            try:
                os.chdir(cwd)
                os.environ.clear()
                os.environ.update(environment(cwd, **variables))
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for number, file in ((1, out), (2, err)):
                    os.dup2(file.fileno(), number)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                sys.argv = ["tangram", *words]
                typer.main.get_command = lambda _: READ  # type: ignore[assignment]
                code = exit_code_of(command_line)
            finally:
                os._exit(code)
        try:
            _, status = os.waitpid(child, 0)
        except BaseException:  # the test's time is over
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(status), *texts)


def exit_code_of(main: Callable[[], None]) -> int:
    """Run a program; return the code with which Python would end, after it has printed what Python would."""
    code = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code
