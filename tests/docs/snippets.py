"""The blocks of code in the pages, and what a page says of how they are tested.

A comment before a block, `<!-- test: … -->`, is one of these. Without one, a block runs as it stands.

| comment | means |
|---|---|
| `test: with a client` | Python that goes on from an open `client`, and from its environment `env` |
| `test: in the background, until it prints "…"` | shell that keeps running beside the blocks after it |
| `test: not here, because …` | the block cannot run on a laptop; the comment says why, and may name the test that runs the like |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("", "text", "console", "mermaid")
"""Languages of blocks that show something instead of being run."""

_BLOCK = re.compile(r"(?:^<!-- test: (?P<test>.*?) -->\n\s*)?^```(?P<language>\w*)(?P<attributes>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block of a page; `file` is the name under which readers are told to save it, empty for none."""

    page: str
    line: int
    language: str
    code: str
    test: str
    file: str

    @property
    def excuse(self) -> str:
        """Why it does not run here, empty where it does."""
        return self.test.removeprefix("not here, because ") if self.test.startswith("not here, because ") else ""

    @property
    def prints(self) -> str:
        """What it prints once it is up, for one that keeps running."""
        found = re.fullmatch(r'in the background, until it prints "(.+)"', self.test)
        return found[1] if found else ""

    def __str__(self) -> str:
        """Return page and line, for messages."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the pages that readers are given."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(path: Path) -> Iterator[Snippet]:
    """Yield the blocks of a page that are not merely shown."""
    text = path.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        if found["language"] in SHOWN:
            continue
        title = re.search(r'title="([^"]+)"', found["attributes"])
        yield Snippet(
            page=str(path.relative_to(ROOT)),
            line=text.count("\n", 0, found.start()) + 1,
            language=found["language"],
            code=found["code"],
            test=" ".join((found["test"] or "").split()),
            file=title[1] if title else "",
        )
