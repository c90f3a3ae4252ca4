"""The tutorial works as it is printed, on an environment that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, snippets
from tests.docs.tutorial import INSTALL, PAGE, script
from tests.ports import free_port


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
    done = subprocess.run(["bash", "-c", typed], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "a program that fails is a result: 3" in done.stdout
    learned = [float(found) for found in re.findall(r"the repair has a probability of ([\d.]+)", done.stdout)]
    assert learned[-1] > learned[0]
