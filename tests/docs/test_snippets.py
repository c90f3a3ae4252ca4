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
from tests.docs.snippets import ROOT, Snippet, pages, snippets
from tests.live.support import SERVICES, Live, running

TUTORIAL = "docs/tutorial.md"
ALL = [snippet for page in pages() for snippet in snippets(page) if snippet.page != TUTORIAL]
RUN = [snippet for snippet in ALL if not snippet.excuse]


def of(*languages: str) -> pytest.MarkDecorator:
    """Parametrize by the blocks in these languages that are to run."""
    chosen = [snippet for snippet in RUN if snippet.language in languages]
    return pytest.mark.parametrize("snippet", chosen, ids=str)


@pytest.fixture(scope="module")
def live(real_component: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Run the stack that the pages take for granted, with stubs of the two tiny models of `tangram up`."""
    folder = tmp_path_factory.mktemp("pages")
    services = folder / "services.toml"
    services.write_text(SERVICES.replace("judge", "rm-small").replace("services.teacher", "services.teacher-0"))
    plan = StackPlan(nodes=1, cores=4, memory_mb=4096, cells=2, services_file=services)
    with running(folder / "state", plan) as live:
        yield live


@pytest.fixture
def variables(live: Live, tmp_path: Path) -> dict[str, str]:
    """Give the variables of a reader's program in the project's folder."""
    return {**live.environment, "PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


def test_every_comment_is_understood_and_every_language_is_looked_at() -> None:
    assert len(ALL) > 20
    for snippet in ALL:
        # Those of a shell run in the tutorial, or say why they cannot.
        assert snippet.language in ("python", "toml", "yaml", "json") or (snippet.language in ("sh", "bash") and snippet.excuse), snippet
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
