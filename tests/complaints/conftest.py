"""A stack with a gateway that these tests share, and a sandbox without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.journal.environments import SILENCE_S
from tests.gateway.conftest import Served, serving
from workers.cpu.process.sandbox import ProcessSandbox

ORPHAN_S = 3 * SILENCE_S
"""Silence after which environments of a client are closed; before that they are listed as orphans for long enough to be seen."""


@pytest.fixture(scope="package")
def served(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a stack whose clients may be silent for `ORPHAN_S`. A test that kills its node starts it again."""
    with serving(tmp_path_factory.mktemp("complaints"), variables={"TANGRAM_ORPHAN_S": str(ORPHAN_S)}) as served:
        yield served


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a process sandbox."""
    box = ProcessSandbox(tmp_path / "box")
    yield box
    box.close()
