"""The units of `deploy/systemd`, as systemd itself reads them."""

from __future__ import annotations

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from tangram import Settings
from tests.needed import needed

from .support import ROOT

UNITS = ROOT / "deploy" / "systemd"
NEWER = "Unknown key 'DelegateSubgroup' in section [Service]"
"""What a systemd before 254 says of what it leaves out."""


@pytest.mark.parametrize(
    "unit", ["tangram-scheduler", "tangram@gateway", "tangram@web", *(f"tangram-worker@{pool}" for pool in ("cpu", "gpu", "api"))]
)
def test_systemd_finds_nothing_wrong(unit: str, tmp_path: Path) -> None:
    needed("" if shutil.which("systemd-analyze") else "needs Debian's systemd")
    # Given the units, with a command that is there
    for file in UNITS.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("/opt/tangram/bin/tangram", "/bin/true"))
    # When systemd looks at one; then it understands all of it
    words = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"{tmp_path}/{unit}.service"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert not [line for line in done.stderr.splitlines() if NEWER not in line]


def read(unit: Path) -> ConfigParser:
    found = ConfigParser(strict=True, interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(unit)
    return found


@pytest.mark.parametrize("unit", sorted(UNITS.iterdir()), ids=lambda unit: unit.stem)
def test_what_ends_without_its_stores_is_started_until_they_are_there(unit: Path) -> None:
    found = read(unit)
    assert found["Unit"]["StartLimitIntervalSec"] == "0" and found["Service"]["Restart"] == "always"


def test_a_migration_may_take_its_time() -> None:
    service = read(UNITS / "tangram-scheduler.service")["Service"]
    assert service["ExecStartPre"].endswith(" db upgrade") and service["TimeoutStartSec"] == "infinity"


def test_a_restart_of_a_worker_hands_over() -> None:
    service = read(UNITS / "tangram-worker@.service")["Service"]
    # SIGTERM goes to the worker alone, which has the time for it, and the next one is in the same folder
    assert service["KillMode"] == "process" and service.get("KillSignal", "SIGTERM") == "SIGTERM"
    assert service.getfloat("TimeoutStopSec") > Settings.model_fields["hand_over_s"].default
    assert service["Environment"] == "TANGRAM_STATE_DIR=/var/lib/tangram/%i" and service["Restart"] == "always"
