"""A release is built from a clean tree whose files and tag agree on the version."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Give a small repository that is ready for a release 1.2.3."""
    for name in ("app", "scheduler", "workers", "migrations", "tangram", "examples/repo"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").touch()
    (tmp_path / "examples" / "rollouts.jsonl").touch()
    for name in ("README.md", "LICENSE", "tangram/README.md", "tangram/LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("pyproject.toml", "tangram/pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text().replace('0.1.0"', '1.2.3"'))
    for name in ("docker-compose.yml", "Dockerfile"):
        (tmp_path / name).write_text((ROOT / name).read_text().replace(":0.1.0", ":1.2.3"))
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2026-01-31\n\n* First.\n")
    (tmp_path / ".gitignore").write_text("dist/\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    git(tmp_path, "tag", "v1.2.3")
    return tmp_path


def git(tree: Path, *words: str) -> None:
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)


def commit(tree: Path) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "a")


def release(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(ROOT / ".ci" / "release"), str(tree)], capture_output=True, text=True)


def test_a_release_has_wheels_and_sources_of_client_and_server(tree: Path) -> None:
    done = release(tree)
    assert done.returncode == 0, done.stderr
    built = {f"{name}-1.2.3{kind}" for name in ("arl_tangram", "arl_tangram_server") for kind in ("-py3-none-any.whl", ".tar.gz")}
    assert {path.name for path in (tree / "dist").iterdir()} == built
    assert set(done.stdout.split()) == {f"dist/{name}" for name in built}


WRONG = [
    ("CHANGELOG.md", "## 1.2.3 - 2026-01-31", "## 1.2.2 - 2026-01-31", "its first release is 1.2.2, not 1.2.3"),
    ("tangram/pyproject.toml", 'version = "1.2.3"', 'version = "1.2.2"', "the client has the version 1.2.2, not 1.2.3"),
    ("pyproject.toml", "arl-tangram==1.2.3", "arl-tangram==1.2.2", "the server does not depend on arl-tangram==1.2.3"),
    ("docker-compose.yml", "arl-tangram:1.2.3", "arl-tangram:1.2.2", "images have the tags 1.2.2, 1.2.3, not 1.2.3"),
]


def test_files_that_disagree_are_named_and_nothing_is_built(tree: Path) -> None:
    for name, before, after, _ in WRONG:
        (tree / name).write_text((tree / name).read_text().replace(before, after))
    done = release(tree)
    named = [f"release: {name}: {said}" for name, _, _, said in WRONG]
    assert (done.returncode, done.stderr.splitlines()) == (2, [*named, "release: the working tree has changes that are not committed"])
    (tree / "CHANGELOG.md").write_text("## 1.2.3\n")
    assert "release: CHANGELOG.md: release 1.2.3 has no date" in release(tree).stderr
    assert not (tree / "dist").exists()


def test_a_commit_without_the_tag_is_no_release(tree: Path) -> None:
    (tree / "README.md").write_text("another one")
    commit(tree)
    done = release(tree)
    assert (done.returncode, done.stderr) == (2, "release: HEAD has no tag v1.2.3: git tag -a v1.2.3\n")
