"""Tiny models, and a made-up vLLM server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.fixtures import models
from tests.vllm.fakes import Fake, fake_python

__all__ = ["models"]


@pytest.fixture
def fake(tmp_path: Path, models: Path) -> Iterator[Fake]:
    """Return a made-up server's folder; what was started ends with the test."""
    made = Fake(tmp_path, models, fake_python(tmp_path))
    yield made
    for engine in made.engines:
        engine.stop(1.0)
