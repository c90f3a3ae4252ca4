"""Runs the tests of rows, each in the interpreter of its client, and says which rows they have shown.

Client and server are what a user installs: the wheels, built from this tree. The tests run in a copy of the tree that lacks the product, so
that nothing but the wheels can be imported.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from tests.clients.environments import ENVIRONMENTS, ROOT, Environment
from tests.clients.rows import Row, nodes_of

PRODUCT = ("app", "migrations", "scheduler", "tangram", "workers")
"""The folders that the wheels hold."""
LIMIT_S = 900
"""How long the tests of one environment may take."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Whether the tests of a row passed: `shown`, `failed` or `skipped`, and why not."""

    row: Row
    state: str
    why: str = ""


def run(rows: Sequence[Row], environments: Iterable[str]) -> list[Shown]:
    """Run the rows of some environments.

    An environment that was not built skips its rows; with CI set they fail. In the others the wheels replace what was installed of them.
    """
    chosen = {name: own for name in environments if (own := [row for row in rows if row.environment == name])}
    absent = "failed" if os.environ.get("CI") else "skipped"
    found = [Shown(row, absent, missing) for name, own in chosen.items() if (missing := ENVIRONMENTS[name].missing) for row in own]
    built = [name for name in chosen if not ENVIRONMENTS[name].missing]
    if built:
        with _without_product() as tree, tempfile.TemporaryDirectory() as folder:
            build = runpy.run_path(str(ROOT / ".ci" / "release"))["build"]
            build(ROOT, Path(folder))
            for name in built:
                environment = _installed(ENVIRONMENTS[name], Path(folder))
                ended = _pytest(environment, tree, nodes_of(chosen[name]))
                found += [_judged(row, ended) for row in chosen[name]]
    return found


@contextmanager
def _without_product() -> Iterator[Path]:
    """Give a copy of the tree without the folders of client and server; it goes in the end."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in map(Path, listed.stdout.splitlines()):
            if path.parts[0] not in PRODUCT and (ROOT / path).is_file():
                (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, Path(folder) / path)
        (Path(folder) / ".venv-clients").symlink_to(ROOT / ".venv-clients")
        yield Path(folder)


def _installed(environment: Environment, folder: Path) -> Environment:
    """Install the wheels of a folder in an environment, and return it.

    The interpreter that this runs in has the tree itself installed. A new environment stands in for it, with all other packages from it.
    """
    if environment.python == Path(sys.executable):
        own = folder / "project"
        if not own.exists():
            venv.create(own)
            (packages,) = own.glob("lib/*/site-packages")
            (packages / "project.pth").write_text(sysconfig.get_path("purelib"))
        environment = replace(environment, python=own / "bin" / "python")
    words = ["--python", str(environment.python), "--quiet", "install", "--no-deps", "--force-reinstall"]
    subprocess.run([sys.executable, "-m", "pip", *words, *map(str, folder.glob("*.whl"))], check=True, stdout=sys.stderr)
    return environment


def _pytest(environment: Environment, tree: Path, nodes: list[str]) -> dict[str, tuple[str, str]]:
    """Run tests of a tree in an interpreter; return by test how it ended, and why. What pytest prints goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(environment.python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *nodes]
        variables = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        print(f"{environment.name}: {len(nodes)} tests …", file=sys.stderr, flush=True)
        try:
            subprocess.run(command, cwd=tree, env=variables, stdout=sys.stderr, check=False, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"{environment.name}: its tests took longer than {LIMIT_S} s", file=sys.stderr)
        return _ended(report) if report.exists() else {}


def _ended(report: Path) -> dict[str, tuple[str, str]]:
    ended: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        bad = [one for kind in ("failure", "error", "skipped") for one in case.iter(kind)]
        state = "shown" if not bad else "skipped" if bad[0].tag == "skipped" else "failed"
        why = (bad[0].get("message") or "").partition("\n")[0] if bad else ""
        node = f"{file}::{case.get('name')}"
        # A test that fails when it is torn down is there twice.
        if ended.get(node, ("shown", ""))[0] == "shown":
            ended[node] = (state, why)
    return ended


def _judged(row: Row, ended: dict[str, tuple[str, str]]) -> Shown:
    """Return what the tests say of a row: a test without parameters in its name stands for all of its own."""
    for test in row.tests:
        ways = [how for node, how in ended.items() if node == test or node.startswith(f"{test}[")]
        if not ways:
            return Shown(row, "failed", f"{test} did not run")
        for state, why in ways:
            if state != "shown":
                return Shown(row, state, f"{test}: {why}")
    return Shown(row, "shown")
