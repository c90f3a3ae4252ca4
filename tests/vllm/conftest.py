"""Tiny models, and a made-up vLLM server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.fakes import Fake, fake_python


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `rm-small` and `teacher-0`."""
    from app.tiny_models import make_services

    return make_services(tmp_path_factory.mktemp("models")).parent


@pytest.fixture
def fake(tmp_path: Path, models: Path) -> Iterator[Fake]:
    """Return a made-up server's folder; what was started ends with the test."""
    made = Fake(tmp_path, models, fake_python(tmp_path))
    yield made
    for engine in made.engines:
        engine.stop(1.0)
