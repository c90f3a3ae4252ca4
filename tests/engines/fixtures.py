"""What tests of engines share in a session: models with real weights, and engines that are resident."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.kinds import Shelf


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `rm-small`, `teacher-0` and `services.toml`."""
    from app.tiny_models import make_services

    return make_services(tmp_path_factory.mktemp("models")).parent


@pytest.fixture(scope="session")
def shelf(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """Return the engines that tests share."""
    made = Shelf(models, tmp_path_factory.mktemp("shelf"))
    yield made
    made.close()


def changed(folder: Path, **keys: object) -> Path:
    """Say something else of a model in its config.json, and nothing of a key that is None; return its folder."""
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder
