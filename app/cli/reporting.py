"""What `tangram report` shows: one run or job, or two of them compared, as figures or as a page."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.cli.run_selection import chosen
from app.report.comparison import compare
from app.report.subject import Subject, read_subject
from scheduler.sim.no_collections import no_collections
from tangram.errors import TangramError
from tangram.settings import Settings


@dataclass(frozen=True, slots=True)
class Report:
    """A run or a job, and what it is compared with."""

    subject: Subject
    against: Subject | None = None

    def document(self) -> dict[str, Any]:
        """Return the figures as a JSON-able document."""
        if self.against is None:
            return self.subject.document()
        return {**self.subject.document(), "against": self.against.document(), "comparison": compare(self.subject, self.against)}


def read_report(settings: Settings, run: str, against: str | None = None) -> Report:
    """Read a run or a job, and another one to compare it with.

    Raises `TangramError` when a journal does not know what is asked for, or cannot be read.
    """
    with no_collections():
        subject = _read(settings, run, "run")
        return Report(subject, _read(settings, against, "against") if against is not None else None)


def _read(settings: Settings, words: str, key: str) -> Subject:
    with chosen(settings, words) as found:
        return read_subject(found.engine, found.name, found.run, found.selection, time.time(), key)


def write_page(report: Report, path: Path) -> str:
    """Write the page of a report, and return what was written in a line; `-` is standard output.

    Raises `OSError` when the file cannot be written, which is said before the page is drawn; `TangramError` when the libraries that draw it
    are not installed.
    """
    if str(path) != "-":
        path.open("ab").close()
    with no_collections():
        content = page_module().render(report.subject, report.against).encode()
    if str(path) == "-":
        sys.stdout.buffer.write(content)
    else:
        path.write_bytes(content)
    return f"wrote {path} ({len(content) / 1e6:.1f} MB)"


def page_module() -> Any:
    """Return the module that makes pages; it needs the extra `report`. Raises `TangramError` where that is not installed."""
    try:
        return importlib.import_module("app.report.page")
    except ModuleNotFoundError as error:
        raise TangramError(f"the report needs {error.name}: pip install 'arl-tangram-server[report]'") from error
