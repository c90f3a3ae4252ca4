"""Every block of code in the pages runs, or says why it cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from app.local.stack import StackPlan
from app.replay.traces import read_trace
from app.services_file import load_services_file
from app.tiny_models import make_services
from tests.docs.snippets import ROOT, Snippet, pages, snippets
from tests.live.support import Live, running

TUTORIAL = "docs/tutorial.md"
ALL = [snippet for page in pages() for snippet in snippets(page) if snippet.page != TUTORIAL]
RUN = [snippet for snippet in ALL if not snippet.excuse]


def of(*languages: str) -> pytest.MarkDecorator:
    """Parametrize by the blocks in these languages that are to run."""
    chosen = [snippet for snippet in RUN if snippet.language in languages]
    return pytest.mark.parametrize("snippet", chosen, ids=str)


@pytest.fixture(scope="module")
def live(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the stack that the pages take for granted, with the two tiny models of `tangram up`."""
    folder = tmp_path_factory.mktemp("pages")
    plan = StackPlan(nodes=1, cores=4, memory_mb=4096, cells=2, services_file=make_services(folder / "models"))
    with running(folder / "state", plan) as live:
        yield live


@pytest.fixture
def variables(live: Live, tmp_path: Path) -> dict[str, str]:
    """Give the variables of a reader's shell in the project's folder."""
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    (tmp_path / "bin").mkdir()
    for name, module in (("tangram", "tangram"), ("tangram-docker", "tangram.integrations.docker_cli")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        script.chmod(0o755)
    return {**live.environment, "PATH": path, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


def test_every_comment_is_understood_and_every_language_is_looked_at() -> None:
    assert len(ALL) > 20
    for snippet in ALL:
        assert snippet.language in ("python", "sh", "bash", "toml", "yaml", "json"), snippet
        assert snippet.excuse or snippet.prints or snippet.test in ("", "with a client"), (snippet, snippet.test)


def test_tests_that_comments_name_exist() -> None:
    for snippet in ALL:
        for name in re.findall(r"tests/[\w/.]+", snippet.excuse):
            assert (ROOT / name.rstrip(".")).exists(), (snippet, name)


@of("python")
def test_python_runs(snippet: Snippet, variables: dict[str, str], tmp_path: Path) -> None:
    code = snippet.code
    if snippet.test == "with a client":
        before = "import signal\nfrom tangram import Client\nwith Client(job='pages') as client:\n    env = client.open(trajectory='t')\n"
        code = before + textwrap.indent(code, "    ")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, f"{snippet}\n{done.stdout}\n{done.stderr}"
    if snippet.page == "docs/index.md":
        assert done.stdout in (ROOT / snippet.page).read_text(encoding="utf-8")


@of("sh", "bash")
def test_shell_runs(snippet: Snippet, variables: dict[str, str], tmp_path: Path) -> None:
    for name in ("examples", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = subprocess.run(["bash", "-euc", snippet.code], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, f"{snippet}\n{done.stdout}\n{done.stderr}"


@of("toml")
def test_services_and_quotas_are_what_the_services_file_takes(snippet: Snippet, tmp_path: Path) -> None:
    declared = tomllib.loads(snippet.code)
    for service in declared.get("services", {}).values():
        for folder in (service.get("model"), service.get("adapter")):
            (tmp_path / (folder or ".")).mkdir(parents=True, exist_ok=True)
    (tmp_path / "services.toml").write_text(snippet.code)

    read = load_services_file(tmp_path / "services.toml")

    assert set(read.services) == set(declared.get("services", {})) and set(read.quotas) == set(declared.get("quotas", {}))


@of("yaml")
def test_yaml_is_yaml(snippet: Snippet) -> None:
    assert yaml.safe_load(snippet.code), snippet


@of("json")
def test_traces_are_read(snippet: Snippet, tmp_path: Path) -> None:
    lines, rest = [], snippet.code.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        lines.append(json.dumps(value))
        rest = rest[end:].strip()
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")

    assert read_trace(path).trajectories, snippet
