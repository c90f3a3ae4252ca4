"""What the page on troubleshooting says that one sees is what the program says."""

from __future__ import annotations

import re

import pytest

from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [row for row in re.findall(r"^\| `([^`]*)`[^|]*\|", PAGE, re.M) if " " in row]
SOURCES = "\n".join(
    path.read_text(encoding="utf-8") for room in ("tangram", "scheduler", "app", "workers") for path in (ROOT / room).rglob("*.py")
)


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 10


@pytest.mark.parametrize("message", MESSAGES)
def test_the_program_says_so(message: str) -> None:
    for fragment in filter(None, (part.strip() for part in message.split("…"))):
        assert fragment in SOURCES, fragment
