"""What these tests need beyond the gateway's: a sandbox of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.conftest import served
from workers.cpu.process.sandbox import ProcessSandbox

__all__ = ["served"]


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[ProcessSandbox]:
    """Give a process sandbox."""
    box = ProcessSandbox(tmp_path / "box")
    yield box
    box.close()
