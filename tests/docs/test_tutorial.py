"""The tutorial works as it is printed, on an environment that is installed: its blocks in order, in one shell, as a reader would type them.

Blocks that are marked as not for a test are left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, Snippet, snippets
from tests.ports import free_port

PAGE = ROOT / "docs" / "tutorial.md"
INSTALL = "make install"
PORT = "8090"


def script(port: int) -> str:
    """Return the tutorial as one Bash script, without the line that installs.

    The live page gets another port than in the tutorial, since others may work on this machine.
    """
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for snippet in (one for one in snippets(PAGE) if not one.excuse):
        lines += [f"echo '== {snippet} at '$SECONDS' s'", *_typed(snippet)]
    typed = [line for text in lines for line in text.splitlines() if not line.startswith(INSTALL)]
    return "\n".join(typed).replace(PORT, str(port)) + "\n"


def _typed(snippet: Snippet) -> Iterator[str]:
    """Yield what a reader does with a block: save it, run it, or leave it running in another terminal."""
    if snippet.file:
        yield f"cat >{shlex.quote(snippet.file)} <<'END OF FILE'\n{snippet.code}END OF FILE"
    elif snippet.prints:
        yield f"{snippet.code.strip()} >background.log 2>&1 &"
        yield "background=$!"
        yield f"until grep -qF {shlex.quote(snippet.prints)} background.log; do"
        yield "  kill -0 $background || { cat background.log; exit 1; }; sleep 0.2"
        yield "done"
    else:
        yield snippet.code


def test_it_begins_with_installing() -> None:
    assert INSTALL in next(snippets(PAGE)).code


@pytest.mark.real
@pytest.mark.timeout(900)  # on a machine that others use it takes long: a stack, a training, some dozen simulations
def test_every_block_works_in_order(tmp_path: Path) -> None:
    for name in ("examples", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = tmp_path / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "activate").write_text(f"export PATH={commands}:{Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}\n")
    (commands / "tangram").write_text(f'#!/bin/sh\nexec {sys.executable} -m tangram "$@"\n')
    (commands / "tangram").chmod(0o755)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    typed = script(free_port())
    # `timeout` signals all that the script has started, so that no stack is left.
    done = subprocess.run(["timeout", "840", "bash", "-c", typed], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "a program that fails is a result: 3" in done.stdout
    learned = [float(found) for found in re.findall(r"the repair has a probability of ([\d.]+)", done.stdout)]
    assert learned[-1] > learned[0]
