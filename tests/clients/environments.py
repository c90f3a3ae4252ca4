"""The interpreters in which clients run, and the versions that are in them."""

from __future__ import annotations

import functools
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Environment:
    """An interpreter with clients, built by `make clients` from a file that has every version."""

    name: str
    constraints: str
    python: Path
    """Runs the tests."""
    packages: Path | None = None
    """Where the packages are, if they are not that interpreter's."""

    @property
    def missing(self) -> str:
        """Return why it cannot be used, nothing where it can."""
        if (self.packages or self.python).exists():
            return ""
        return f"{(self.packages or self.python.parent).parent.relative_to(ROOT)} was not built: make clients CLIENTS={self.name}"

    def version(self, package: str) -> str:
        """Return the version of a package that the file has. Raises `KeyError` where it has none."""
        return _versions(ROOT / self.constraints)[package]


@functools.cache
def _versions(constraints: Path) -> dict[str, str]:
    text = constraints.read_text(encoding="utf-8")
    if constraints.suffix == ".json":
        installed = json.loads(text)["packages"]
        return {path.removeprefix("node_modules/"): one["version"] for path, one in installed.items() if path}
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def _own(name: str) -> Environment:
    return Environment(name, f"constraints-clients-{name}.txt", ROOT / ".venv-clients" / name / "bin" / "python")


ENVIRONMENTS = {
    one.name: one
    for one in (
        Environment("project", "constraints.txt", Path(sys.executable)),
        _own("agents"),
        _own("verifiers"),
        _own("nemo-gym"),
        _own("training"),
        Environment(
            "javascript",
            "tests/clients/javascript/package-lock.json",
            Path(sys.executable),
            ROOT / ".venv-clients" / "javascript" / "node_modules",
        ),
    )
}
"""By name: the project's own, which is the interpreter that this runs in, and those that cannot share it."""
