"""The page of known failures names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_each_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "known-failures.md").read_text(encoding="utf-8")
    named = _NAMED.findall(page)
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| failure")]
    assert len(rows) >= 16 and all(_NAMED.search(row) for row in rows)
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")]
    assert missing == []


def test_each_module_of_known_failures_is_on_the_page() -> None:
    named = {path for path, _ in _NAMED.findall((ROOT / "docs" / "known-failures.md").read_text(encoding="utf-8"))}
    paths = [*(ROOT / "tests" / "complaints").glob("test_*.py"), ROOT / "tests" / "containers" / "test_known_failures.py"]
    written = {str(path.relative_to(ROOT)) for path in paths if path != Path(__file__).resolve()}
    assert written - named == set()
