"""A stack that the classes for frameworks run on, and this process pointed at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.local.stack import StackPlan
from tests.live.support import Live, running


@pytest.fixture(scope="package")
def stack(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the stack that these tests share; none of them may harm it."""
    plan = StackPlan(nodes=1, cores=2, memory_mb=4096, api_nodes=0)
    with running(tmp_path_factory.mktemp("integrations"), plan) as live:
        yield live


@pytest.fixture
def live(stack: Live, monkeypatch: pytest.MonkeyPatch) -> Live:
    """Give the stack, as the one that `Settings()` of this process and its children names."""
    for name, text in stack.environment.items():
        monkeypatch.setenv(name, text)
    return stack


@pytest.fixture
def executable(tmp_path: Path) -> str:
    """Return the path of `tangram-docker`, as a script of this source tree."""
    script = tmp_path / "tangram-docker"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={Path.cwd()} exec {sys.executable} -m tangram.integrations.docker_cli "$@"\n')
    script.chmod(0o755)
    return str(script)


def standing(live: Live) -> list[str]:
    """Return the ids of the environments that stand."""
    return [row[0] for row in live.rows("select id from environments where state = 'open'")]
