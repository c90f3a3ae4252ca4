"""What holds for the command line as a whole: version, completion, colours."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.forked import ROOT, environment, forked
from tests.cli.template import PROGRAM, Forked

TRACE = ROOT / "examples" / "rollouts.jsonl"


def test_the_version_is_that_of_the_project(tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert forked("--version", cwd=tmp_path).stdout == f"tangram {version}\n"


def test_the_command_line_is_there_before_what_only_some_commands_need() -> None:
    program = "import sys, app.cli; print({'celery', 'redis', 'scheduler', 'sqlalchemy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "set()\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_completion_for_shells(tmp_path: Path, shell: str) -> None:
    done = forked(cwd=tmp_path, _TANGRAM_COMPLETE=f"source_{shell}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "_TANGRAM_COMPLETE" in done.stdout


def test_completion_knows_the_commands(tmp_path: Path) -> None:
    words = {"_TANGRAM_COMPLETE": "complete_bash", "COMP_WORDS": "tangram rep", "COMP_CWORD": "1"}
    assert forked(cwd=tmp_path, **words).stdout.split() == ["report", "replay"]


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_no_colours_where_they_are_not_wanted(tmp_path: Path, variable: str) -> None:
    words = (*PROGRAM, "replay", str(TRACE), "--simulate", "--cores", "2")
    unwanted = {"NO_COLOR": "1", "TERM": "xterm-256color"} if variable == "NO_COLOR" else {"TERM": "dumb"}
    shown = on_a_terminal(words, environment(tmp_path, **unwanted))
    assert "policy elastic" in shown
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[;m]", shown)


def on_a_terminal(words: tuple[str, ...], env: dict[str, str]) -> str:
    """Return what a command prints to a terminal."""
    ours, its = pty.openpty()
    process = Forked(words, env=env, stdin=its, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # the terminal is gone with its last process
        pass
    finally:
        os.close(ours)
        process.wait(timeout=60)
    assert process.returncode == 0
    return shown.decode()
