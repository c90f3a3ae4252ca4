"""Tiny models, and engines of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fixtures import models, shelf
from tests.engines.kinds import KINDS, Kind, Shelf

__all__ = ["models", "shelf"]


@pytest.fixture
def kind(request: pytest.FixtureRequest, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shelf: Shelf) -> Iterator[Kind]:
    """Return the kind of engine that a test is run with, see `kinds.engines`."""
    made = KINDS[request.param](models, tmp_path, monkeypatch, shelf)
    yield made
    made.close()
