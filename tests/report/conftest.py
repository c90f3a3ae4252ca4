"""A real browser for pages of reports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.report.scene import Scene

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.fixture(scope="module")
def browser(real_component: None) -> Iterator[Browser]:
    """Start the Chromium of this machine; where there is none skip, in CI fail.

    For one module: Playwright keeps the event loop of its thread, which other modules need.
    """
    from playwright.sync_api import Error, sync_playwright  # half a second that other tests do not need

    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        try:
            if found is None:
                raise Error("no chromium on the PATH")
            # As root, Chromium starts without its sandbox only.
            started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        except Error as error:
            message = f"these tests need Chromium: {str(error).splitlines()[0]}"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)
        yield started
        started.close()


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
