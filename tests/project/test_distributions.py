"""Client and server are two distributions. Both are built from this tree, and the wheels run where nothing else is installed."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PathDistribution, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SERVER = ("app", "scheduler", "workers", "migrations")
OLDEST, NEWEST = "3.11", "3.13"
HANG_S = 600
ROLLOUTS = ("add-stopwords", "fix-wrap")
LONGEST_S = 0.5
"""Of these rollouts of the demo, the actions that take no longer: of every kind between them, 22 in all."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build both distributions as a release does; give the wheels of client and server."""
    out = tmp_path_factory.mktemp("dist")
    runpy.run_path(str(ROOT / ".ci" / "release"))["build"](ROOT, out)
    (client,), (server,) = out.glob("arl_tangram-*.whl"), out.glob("arl_tangram_server-*.whl")
    return client, server


def test_the_wheels_hold_what_runs_and_nothing_else(wheels: tuple[Path, Path]) -> None:
    client, server = ({name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} for wheel in wheels)
    assert client == {f"tangram/{name}" for name in tree("tangram") - {"pyproject.toml", "README.md", "LICENSE"}}
    examples = {f"app/examples/{name}" for name in tree("examples") if name == "rollouts.jsonl" or name.startswith("repo/")}
    assert server == {f"{folder}/{name}" for folder in SERVER for name in tree(folder)} | examples
    assert (ROOT / "tangram" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def tree(folder: str) -> set[str]:
    """Return the files of a folder of this tree."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT / folder).as_posix() for path in paths}


@dataclass
class Bare:
    """A virtual environment without anything but what a test installs, and an empty folder to work in."""

    bin: Path
    folder: Path
    path: str
    _linked: set[tuple[str, ...]] = field(default_factory=set)

    def install(self, *wheels: Path) -> None:
        # By the pip of the tests, so that no environment needs one of its own. Python compiles what it imports.
        words = ["--python", str(self.bin / "python"), "--quiet", "install", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
        words += ["--no-deps"] if self.is_like_this else []
        subprocess.run([sys.executable, "-m", "pip", *words, *map(str, wheels)], check=True, timeout=HANG_S)
        if self.is_like_this:
            for wheel in wheels:
                (about,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
                self._link(PathDistribution(about).requires or ())

    @property
    def is_like_this(self) -> bool:
        """Whether it is of the Python of the tests, so that it can have what is installed there."""
        return (self.bin / f"python{sys.version_info[0]}.{sys.version_info[1]}").exists()

    def _link(self, required: Iterable[str], extras: Iterable[str] = ()) -> None:
        """Install what is required as links to what the tests have: neither unpacked nor compiled once more."""
        (packages,) = self.bin.parent.glob("lib/python*/site-packages")
        for needed in map(Requirement, required):
            if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                continue
            if needed.name.startswith("arl-tangram") or (needed.name, *needed.extras) in self._linked:
                continue
            self._linked.add((needed.name, *needed.extras))
            found = distribution(needed.name)
            assert needed.specifier.contains(found.version, prereleases=True), needed
            for top in {path.parts[0] for path in found.files or ()} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(str(found.locate_file(top)))
            self._link(found.requires or (), needed.extras)

    def environment(self, **variables: str) -> dict[str, str]:
        return {"PATH": f"{self.bin}:{self.path}", "HOME": str(self.folder), "LANG": "C.UTF-8", **variables}

    def run(self, program: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.bin / program), *words]
        return subprocess.run(
            argv, cwd=self.folder, env=self.environment(**variables), capture_output=True, text=True, timeout=HANG_S, check=False
        )


def bare(version: str, tmp_path: Path, path: str) -> Bare:
    """Make an environment of a Python; skip where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [*sorted(pyenv.glob(f"{version}.*/bin/python{version}")), *filter(None, [shutil.which(f"python{version}")])]
    if not found:
        pytest.skip(f"no Python {version} is here")
    subprocess.run([found[0], "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=HANG_S)
    (tmp_path / "empty").mkdir()
    return Bare(tmp_path / "venv" / "bin", tmp_path / "empty", path)


def actions_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the actions of a step of a trace."""
    return list(step["actions"]) if "actions" in step else [step["action"]]


@pytest.mark.real
@pytest.mark.timeout(3 * HANG_S)
def test_the_demo_runs_in_an_empty_folder(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    client, server = wheels
    env = bare(OLDEST, tmp_path, os.environ["PATH"])
    # Given the client alone, a command of the server says what to install
    env.install(client)
    alone = env.run("tangram", "demo")
    said = "tangram: only the client is installed here; the server comes with `pip install arl-tangram-server`\n"
    assert (alone.returncode, alone.stderr) == (2, said)
    # When it is installed, without torch and without the extra of the report
    env.install(client, server)
    # And the short actions of two of its rollouts are replayed once; `make demo` replays all of them
    (bundled,) = (tmp_path / "venv").glob("lib/*/site-packages/app/examples/rollouts.jsonl")
    header, *rollouts = map(json.loads, bundled.read_text().splitlines())
    rollouts = [rollout for rollout in rollouts if rollout["trajectory"] in ROLLOUTS]
    for rollout in rollouts:
        rollout["steps"] = [step for step in rollout["steps"] if all(action["work_s"] <= LONGEST_S for action in actions_of(step))]
    bundled.write_text("".join(json.dumps(line) + "\n" for line in (header, *rollouts)))
    done = env.run("tangram", "demo", "--speed", "50", "--once")
    # Then stand-ins answer for the models, and everything has run
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "stand-ins answer for the models" in done.stderr and "pip install 'arl-tangram-server[report]'" in done.stderr
    assert re.match(r"Compared with static:1, elastic has a mean ACT .* reserved\.", done.stdout)
    figures = json.loads((env.folder / ".tangram" / "demo" / "report.json").read_text())
    assert [(figures[policy]["actions"], figures[policy]["failed"]) for policy in ("static:1", "elastic")] == [(22, 0), (22, 0)]


@pytest.mark.real
@pytest.mark.timeout(3 * HANG_S)
def test_a_stack_runs_without_anything_else_on_the_machine(wheels: tuple[Path, Path], tmp_path: Path) -> None:
    # Given an environment in which not even a Redis is on the PATH
    env = bare(NEWEST, tmp_path, "")
    env.install(*wheels)
    assert "worker" in env.run("tangram", "--help").stdout
    # And a folder with a program whose name the server uses
    theirs = env.folder / "app.py"
    theirs.write_text("raise SystemExit('this must not run')\n")
    # When a stack is started there
    with subprocess.Popen(
        [env.bin / "tangram", "up"], cwd=env.folder, env=env.environment(TANGRAM_STATE_DIR="state"), stderr=subprocess.PIPE, text=True
    ) as up:
        try:
            assert up.stderr is not None
            lines = []
            while (line := up.stderr.readline()) and "the stack is up" not in line:
                lines.append(line)
            assert line, lines
            # Then it answers, by its own Redis, and its database is up to date
            status = env.run("tangram", "status", "--json", TANGRAM_STATE_DIR="state")
            assert {node["name"]: node["state"] for node in json.loads(status.stdout)["nodes"]} == {"cpu-0": "up", "api-0": "up"}
            assert "Valkey" in (env.folder / "state" / "logs" / "redis.log").read_text()
            assert env.run("tangram", "db", "upgrade", TANGRAM_STATE_DIR="state").returncode == 0
            # And the program of that name is told, where Python would take it for the server's
            hidden = env.run("python", "-m", "tangram", "status")
            assert hidden.returncode == 2
            assert hidden.stderr.startswith(f"tangram: {theirs} hides the server's package `app`") and hidden.stderr.count("\n") == 1
            theirs.unlink()
            ping = env.run("python", "-m", "celery", "-A", "app", "inspect", "ping", TANGRAM_STATE_DIR="state")
            assert "2 nodes online" in ping.stdout, ping.stderr
        finally:
            up.send_signal(signal.SIGINT)
        assert up.wait(HANG_S) == 0
