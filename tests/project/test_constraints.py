"""The pinned versions can be installed by everybody to whom the README promises it."""

from __future__ import annotations

import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_every_pinned_package_runs_on_the_oldest_python() -> None:
    """A pin that needs a later patch of Python makes `make install` fail as a conflict, without naming the reason."""
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"]
    oldest = promised.removeprefix(">=") + ".0"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {
        canonicalize_name(line.partition("==")[0].partition("[")[0]): line.partition("==")[2].split()[0] for line in lines if "==" in line
    }
    found = {canonicalize_name(one.metadata["Name"]): one for one in distributions()}
    too_late = {
        f"{name} {found[name].version}": needed
        for name, version in pinned.items()
        if name in found and found[name].version == version
        if (needed := found[name].metadata["Requires-Python"]) and not SpecifierSet(needed).contains(oldest)
    }
    assert len(pinned) > 100 and len(pinned.keys() & found.keys()) > 50
    assert too_late == {}
