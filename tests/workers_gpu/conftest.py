"""Tiny models, made once for all tests of this area."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.gpu.devices import Device


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `rm-small`, `teacher-0` and `services.toml`."""
    from app.tiny_models import make_services

    return make_services(tmp_path_factory.mktemp("models")).parent


@pytest.fixture
def cells() -> list[Device]:
    """Return two CPU devices of 1000 MiB."""
    return [Device(f"cpu:{index}", "cpu", 1000, "cpu") for index in range(2)]


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Return a function that waits for a condition, at most a minute."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            time.sleep(0.001)

    return wait
