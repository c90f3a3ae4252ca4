"""Journals for reports, and pages of these in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.report.scene import Scene
from tests.web.conftest import browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser"]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@dataclass
class Opened:
    """A page in the browser, with all that it asked for and complained of."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def lines(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()


@contextmanager
def opened(browser: Browser, path: Path, *, width: int = 1440, scheme: str = "light") -> Iterator[Opened]:
    """Open a report, and wait until all of its pictures are drawn."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(120_000)
    found = Opened(page)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("console", lambda message: found.complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (found.complaints.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    try:
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        yield found
    finally:
        page.close()
