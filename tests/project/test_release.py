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
    shutil.copytree(ROOT / "tangram", tmp_path / "tangram", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text().replace('version = "0.1.0"', 'version = "1.2.3"'))
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


def test_a_release_has_wheel_and_source(tree: Path) -> None:
    done = release(tree)

    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tree / "dist").iterdir()} == {"arl_tangram-1.2.3-py3-none-any.whl", "arl_tangram-1.2.3.tar.gz"}


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("CHANGELOG.md", "## 1.2.3 - 2026-01-31", "## 1.2.2 - 2026-01-31", "its first release is 1.2.2, not 1.2.3"),
        ("CHANGELOG.md", " - 2026-01-31", "", "release 1.2.3 has no date"),
        ("docker-compose.yml", "arl-tangram:1.2.3", "arl-tangram:1.2.2", "images have the tags 1.2.2, 1.2.3, not 1.2.3"),
    ],
)
def test_files_that_disagree_are_named_and_nothing_is_built(tree: Path, name: str, before: str, after: str, said: str) -> None:
    (tree / name).write_text((tree / name).read_text().replace(before, after))

    done = release(tree)

    assert done.returncode == 2
    assert f"release: {name}: {said}" in done.stderr
    assert "release: the working tree has changes that are not committed" in done.stderr
    assert not (tree / "dist").exists()


def test_a_commit_without_the_tag_is_no_release(tree: Path) -> None:
    (tree / "README.md").write_text("another one")
    commit(tree)

    done = release(tree)

    assert (done.returncode, done.stderr) == (2, "release: HEAD has no tag v1.2.3: git tag -a v1.2.3\n")
