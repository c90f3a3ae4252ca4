"""Journals in SQLite with the tables in them, as copies of one that was migrated once: a hundredth of the time of the migrations."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from app.journal.database import sqlite_url
from app.journal.migrating import upgrade


@cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tangram-journal-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "tangram.sqlite"
    upgrade(sqlite_url(path))
    return path


def new_journal(path: Path) -> str:
    """Make an empty journal at `path`; return its URL."""
    shutil.copyfile(_template(), path)
    return sqlite_url(path)
